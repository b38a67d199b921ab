"""The hardware flags, declared once for every command that builds a backend.

`@hardware_flags` takes a command's parameter `hardware: HardwareConfig` and puts the flags in its place, so that Typer sees
them and the command gets one settled config. Defaults and choices are those of HardwareConfig; names of platforms come from
the registry, so that registering one is the only step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from ..core.config import make_settings
from ..hardware.base.config import AUTO, Fallback, HardwareConfig, Verify
from ..hardware.base.registry import attention_names, platform_names

PANEL = "Hardware"
TAKEN = "hardware"  # the parameter that the flags stand for


def hardware_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the command's parameter `hardware` by the flags; what they say together is checked before the command runs."""
    signature = inspect.signature(command, eval_str=True)
    assert TAKEN in signature.parameters, f"{command.__name__} takes no {TAKEN}"
    flags = list(_flags())
    names = [flag.name for flag in flags]

    @functools.wraps(command)
    def with_hardware(**given: Any) -> None:
        values = {name: given.pop(name) for name in names}
        # A flag that was given several times says the same as one with commas.
        said = {name: ",".join(value) if isinstance(value, list) else value for name, value in values.items()}
        said = {name: value for name, value in said.items() if value is not None}
        command(**given, **{TAKEN: make_settings(HardwareConfig, said, where="the hardware flags")})

    own = [parameter for parameter in signature.parameters.values() if parameter.name != TAKEN]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *flags)]
    with_hardware.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_hardware.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_hardware


def _flags() -> Iterator[inspect.Parameter]:
    """A parameter for each flag, named like the setting it fills."""
    yield _flag("hardware_platform", str, f"{AUTO} (the accelerator that answers), {', '.join(platform_names())}.")
    yield _flag("device", str | None, "The device, as torch spells it; implies the platform.", metavar="TYPE[:INDEX]")
    yield _flag("allow_cpu", bool, f"Let {AUTO} take the CPU although an accelerator's probe failed.", "--allow-cpu")
    yield _flag("extra_ops", list[str], "Plugins of operations to load: entry points, as a,b.", metavar="NAMES")
    yield _flag("extra_att", list[str], "Plugins of attention to load: entry points, as a,b.", metavar="NAMES")
    pins = "Which plugin fills a field that several register; repeatable."
    yield _flag("op", list[str], pins, metavar="GROUP.FIELD=PLUGIN")
    attention = f"{AUTO}, {', '.join(attention_names())}, or what --extra-att loads."
    yield _flag("attention", str, attention, metavar=f"NAME|{AUTO}")
    fallback = "A missing operation that others can replace is refused, replaced and reported, or replaced."
    yield _flag("fallback", Fallback, fallback)
    yield _flag("verify_plugins", Verify, "How much a plugin's numbers are checked before it is used.")


def _flag(name: str, kind: Any, text: str, *spelling: str, metavar: str | None = None) -> inspect.Parameter:
    default = HardwareConfig.model_fields[name].get_default(call_default_factory=True)
    if not isinstance(default, (str, bool, type(None))):  # an empty collection
        default, kind = None, kind | None
    option = typer.Option(*spelling, help=text, metavar=metavar, rich_help_panel=PANEL)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
