"""Everything that knows about devices. `get_hardware_backend(config)` is the one way in."""

from .base.backend import HardwareBackend
from .base.registry import HardwareConfig, get_hardware_backend, platform_names, register_platform

__all__ = ["HardwareBackend", "HardwareConfig", "get_hardware_backend", "platform_names", "register_platform"]
