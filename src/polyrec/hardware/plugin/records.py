"""What plugin modules register, kept until a plugin that lists the module is asked for: a record by itself changes nothing.

A record belongs to the module that called, and to the module that was being loaded for a plugin at that time (they differ
when a module registers through a helper). So a module that somebody imported earlier is still found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...core.errors import HardwareError
from .source import Kind, PluginError, PluginSource

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Record:
    """key: `group.field`, or an attention backend's name. value: the function or class."""

    kind: Kind
    key: str
    value: Any
    caller: str
    loading: str | None

    @property
    def identity(self) -> tuple[str, ...]:
        """The same again is one record: a module that is reloaded replaces what it registered."""
        name = getattr(self.value, "__qualname__", None) or repr(self.value)
        return (self.kind, self.key, self.caller, str(getattr(self.value, "__module__", "")), name)


@dataclass
class Loading:
    """A plugin while it is imported. module: None while its entry point is. entered: what it called and must not. before:
    modules that were there already."""

    source: PluginSource
    module: str | None
    made: list[Record] = field(default_factory=list)
    entered: str = ""
    before: frozenset[str] = field(default_factory=lambda: frozenset(sys.modules))


_loading: ContextVar[Loading | None] = ContextVar("polyrec_plugin_loading", default=None)
_records: dict[tuple[str, ...], Record] = {}  # the registry of this file


def register_ops(**groups: Mapping[str, Callable[..., Any]]) -> None:
    """Registers implementations by group and field: `register_ops(norm={"rms_norm": f})`.

    Called while a plugin's module is imported. Fields that are not named keep the built-in. Errors: `plugin_not_callable`.
    """
    caller = _caller()
    for group, functions in groups.items():
        if not isinstance(functions, Mapping):
            raise _fault(caller, f"registers {functions!r} as group '{group}'", f'Write {group}={{"field": function}}.')
        for name, function in functions.items():
            if not callable(function):
                raise _fault(
                    caller,
                    f"registers {function!r} as '{group}.{name}', which cannot be called",
                    "Register a function.",
                )
    for group, functions in groups.items():
        for name, function in functions.items():
            _add("ops", f"{group}.{name}", function, caller)


def register_att_backend(name: str) -> Callable[[C], C]:
    """Decorates an `AttentionBackend` subclass: `@register_att_backend("name")`, the name that `--attention` takes.

    Errors: `plugin_not_callable`.
    """
    caller = _caller()
    if not (isinstance(name, str) and name.strip() == name != ""):
        raise _fault(
            caller,
            f"registers an attention backend as {name!r}, which is no name",
            'Write @register_att_backend("name").',
        )

    def register(cls: C) -> C:
        if not callable(cls):
            raise _fault(caller, f"registers {cls!r} as attention '{name}'", "Decorate a class.")
        _add("att", name, cls, caller)
        return cls

    return register


def records_of(kind: Kind, module: str) -> list[Record]:
    """What a module registered, or had registered while it was loaded."""
    return [record for record in _records.values() if record.kind == kind and module in (record.caller, record.loading)]


@contextmanager
def loading(source: PluginSource, module: str | None) -> Iterator[Loading]:
    """Imports inside are for this plugin. If they fail, nothing that they registered is kept."""
    state = Loading(source, module)
    token = _loading.set(state)
    try:
        yield state
    # A plugin may exit or be interrupted while it is imported: nothing of it stays, the error goes on.
    except BaseException:
        _forget(state)
        raise
    finally:
        _loading.reset(token)


def refuse_while_loading(function: str) -> None:
    """`plugin_import_reentrant` when a plugin that is being imported calls `function`."""
    state = _loading.get()
    if state is not None:
        state.entered = function
        raise reentrant(state)


def reentrant(state: Loading) -> PluginError:
    """The error for a plugin that asked for the hardware which was waiting for it."""
    return PluginError(
        "plugin_import_reentrant",
        state.source,
        f"calls {state.entered} while {'it' if state.module is None else repr(state.module)} is being imported, "
        "and the hardware is only built once the import is over.",
        "Register at import, and take what is needed from the arguments when an operation is called.",
    )


def registered_twice(source: PluginSource, first: Record, second: Record) -> PluginError:
    """`plugin_conflict` of a plugin with itself: which of the two is meant, it alone can say."""
    return PluginError(
        "plugin_conflict",
        source,
        f"registers '{first.key}' twice: {first.value!r} in '{first.caller}' and {second.value!r} in '{second.caller}'.",
        "Register it once; the order of registering decides nothing.",
    )


def _add(kind: Kind, key: str, value: Any, caller: str) -> None:
    state = _loading.get()
    record = Record(kind, key, value, caller, state.module if state else None)
    for earlier in state.made if state else ():
        if (earlier.kind, earlier.key) == (kind, key) and earlier.value is not value:
            assert state is not None
            raise registered_twice(state.source, earlier, record)
    _records[record.identity] = record
    if state is not None:
        state.made.append(record)


def _forget(state: Loading) -> None:
    """Drops a failed import's records, and the modules that made them, so that a second try runs them again."""
    for record in state.made:
        _records.pop(record.identity, None)
    for name in {record.caller for record in state.made} - state.before:
        package, _, attribute = name.rpartition(".")
        if sys.modules.pop(name, None) is not None and package in sys.modules:
            vars(sys.modules[package]).pop(attribute, None)  # else `from package import name` would not run it again


def _caller() -> str:
    """The module that called a function of this file."""
    return sys._getframe(2).f_globals.get("__name__", "")


def _fault(caller: str, message: str, remedy: str) -> HardwareError:
    state = _loading.get()
    if state is None:
        return HardwareError("plugin_not_callable", f"Module '{caller}' {message}.", remedy)
    return PluginError("plugin_not_callable", state.source, f"{message} (in '{caller}').", remedy)
