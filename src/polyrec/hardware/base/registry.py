"""Platforms by name. Registering records a class path; nothing of a platform is imported until it is chosen."""

from __future__ import annotations

from typing import Any, Literal

from ...core.config import Settings
from ...core.errors import HardwareError
from ...core.registry import Registry
from .backend import HardwareBackend

PlatformName = str


class HardwareConfig(Settings):
    """What a command says about hardware. platform: a registered name, or auto."""

    platform: PlatformName | Literal["auto"] = "auto"


_PLATFORMS = Registry("platform")
_chosen: list[tuple[HardwareConfig, HardwareBackend]] = []  # one per process, as DESIGN section 5 allows


def register_platform(name: str, path: str) -> None:
    """Records `module:Class` under a name."""
    _PLATFORMS.register(name, path)


def platform_names() -> list[str]:
    """All registered names; imports nothing."""
    return _PLATFORMS.names()


def get_hardware_backend(config: HardwareConfig | None = None) -> HardwareBackend:
    """Builds the chosen platform once per process and returns the same object after; a different config is an error.

    config None: what was chosen before, else auto.
    """
    if _chosen:
        earlier, backend = _chosen[0]
        if config is not None and earlier != config:
            raise HardwareError(
                "hardware_chosen_already",
                f"This process already runs on {earlier}, and cannot change to {config}.",
                "Start another process for another platform.",
            )
        return backend
    config = config or HardwareConfig()
    # The CPU is the one platform so far; with others, auto asks their probes first.
    name = "cpu" if config.platform == "auto" else config.platform
    cls = _PLATFORMS.load(name)
    if not (isinstance(cls, type) and issubclass(cls, HardwareBackend)):
        raise HardwareError("platform_not_a_backend", f"Platform '{name}' is {cls!r}, not a HardwareBackend class.")
    if cls.platform_name != name:
        raise HardwareError(
            "platform_name_differs",
            f"Platform '{name}' is registered as a class that calls itself '{cls.platform_name}'.",
            "Register it under its own platform_name.",
        )
    make: Any = cls  # a platform's own constructor needs no arguments
    chosen: HardwareBackend = make()
    _chosen.append((config, chosen))
    return chosen


register_platform("cpu", "polyrec.hardware.backends.cpu:CpuBackend")
