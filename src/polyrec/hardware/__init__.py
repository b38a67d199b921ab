"""Everything that knows about devices. `get_hardware_backend(config)` is the one way in.

Names load on first use, and torch with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base.backend import HardwareBackend as HardwareBackend
    from .base.config import HardwareConfig as HardwareConfig
    from .base.registry import platform_names as platform_names
    from .base.registry import register_platform as register_platform
    from .process import build_hardware_backend as build_hardware_backend
    from .process import get_hardware_backend as get_hardware_backend

_PUBLIC = {
    "HardwareBackend": "base.backend",
    "HardwareConfig": "base.config",
    "build_hardware_backend": "process",
    "get_hardware_backend": "process",
    "platform_names": "base.registry",
    "register_platform": "base.registry",
}
__all__ = [
    "HardwareBackend",
    "HardwareConfig",
    "build_hardware_backend",
    "get_hardware_backend",
    "platform_names",
    "register_platform",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
