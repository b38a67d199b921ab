"""Flags that stand for one settings class, declared once for every command that takes it.

A command has one parameter for the settings; a decorator puts the flags in its place, so that Typer sees them and the command
gets one settled value. Defaults and choices are those of the class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from ..core.config import Settings, make_settings


def settings_flags(
    command: Callable[..., None], taken: str, cls: type[Settings], flags: Iterable[inspect.Parameter], where: str
) -> Callable[..., None]:
    """`command` with `flags` instead of its parameter `taken`; what they say together is checked before it runs."""
    signature = inspect.signature(command, eval_str=True)
    assert taken in signature.parameters, f"{command.__name__} takes no {taken}"
    flags = list(flags)
    names = [flag.name for flag in flags]

    @functools.wraps(command)
    def with_settings(**given: Any) -> None:
        values = {name: given.pop(name) for name in names}
        # A flag that was given several times says the same as one with commas.
        said = {name: ",".join(value) if isinstance(value, list) else value for name, value in values.items()}
        said = {name: value for name, value in said.items() if value is not None}
        command(**given, **{taken: make_settings(cls, said, where=where)})

    own = [parameter for parameter in signature.parameters.values() if parameter.name != taken]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *flags)]
    with_settings.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_settings.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_settings


def flag(
    cls: type[Settings],
    panel: str,
    name: str,
    kind: Any,
    text: str,
    *spelling: str,
    metavar: str | None = None,
) -> inspect.Parameter:
    """The flag of one setting, named like it."""
    default = cls.model_fields[name].get_default(call_default_factory=True)
    if not isinstance(default, (str, bool, int, float, type(None))):  # an empty collection
        default, kind = None, kind | None
    option = typer.Option(*spelling, help=text, metavar=metavar, rich_help_panel=panel)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
