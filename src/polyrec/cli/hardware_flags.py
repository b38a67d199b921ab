"""The hardware flags, declared once for every command that builds a backend.

`@hardware_flags` puts them in the place of a command's parameter `hardware: HardwareConfig`. Names of platforms come from the
registry, so that registering one is the only step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator

from ..hardware.base.config import AUTO, Fallback, HardwareConfig, Verify
from ..hardware.base.registry import attention_names, platform_names
from .settings_flags import flag, settings_flags

PANEL = "Hardware"


def hardware_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the command's parameter `hardware` by the flags; what they say together is checked before the command runs."""
    return settings_flags(command, "hardware", HardwareConfig, _flags(), "the hardware flags")


def _flags() -> Iterator[inspect.Parameter]:
    """A parameter for each flag, named like the setting it fills."""
    own = functools.partial(flag, HardwareConfig, PANEL)
    yield own("hardware_platform", str, f"{AUTO} (the accelerator that answers), {', '.join(platform_names())}.")
    yield own("device", str | None, "The device, as torch spells it; implies the platform.", metavar="TYPE[:INDEX]")
    yield own("gpu", int | None, "Index of the device, whatever the platform.", metavar="INDEX")
    yield own("allow_cpu", bool, f"Let {AUTO} take the CPU although an accelerator's probe failed.", "--allow-cpu")
    yield own("extra_ops", list[str], "Plugins of operations to load: entry points, as a,b.", metavar="NAMES")
    yield own("extra_att", list[str], "Plugins of attention to load: entry points, as a,b.", metavar="NAMES")
    pins = "Which plugin fills a field that several register; repeatable."
    yield own("op", list[str], pins, metavar="GROUP.FIELD=PLUGIN")
    attention = f"{AUTO}, {', '.join(attention_names())}, or what --extra-att loads."
    yield own("attention", str, attention, metavar=f"NAME|{AUTO}")
    fallback = "A missing operation that others can replace is refused, replaced and reported, or replaced."
    yield own("fallback", Fallback, fallback)
    yield own("verify_plugins", Verify, "How much a plugin's numbers are checked before it is used.")
