"""The errors a user can fix. Each has a stable code for machines, what went wrong, and what to do about it.

Our own mistakes are `assert`s. The command line prints a PolyrecError without a traceback; the server answers with its code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class PolyrecError(Exception):
    """A fault that the user can mend.

    code: stable, lower-case with underscores, for scripts and HTTP clients.
    message: what is wrong, where, with the values that disagree.
    remedy: what to do.
    """

    def __init__(self, code: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()

    def __reduce__(self) -> tuple[Any, ...]:
        """Whatever a subclass takes, an error that a worker raises reaches its parent as it is."""
        return _restore, (type(self), self.message, self.__dict__)


def _restore(cls: type[PolyrecError], message: str, state: dict[str, Any]) -> PolyrecError:
    error = cls.__new__(cls, message)
    error.__dict__.update(state)
    return error


class DataError(PolyrecError):
    """An input file or table cannot be used as it is."""


class ConfigError(PolyrecError):
    """A setting is unknown, out of range, or contradicts another."""


class CatalogError(PolyrecError):
    """Items, SIDs and codebooks do not fit together."""


class CheckpointError(PolyrecError):
    """A model folder is incomplete or does not match what it is used with."""


class HardwareError(PolyrecError):
    """A platform is unknown, unusable, or lacks an operation."""


class TrainingError(PolyrecError):
    """Training cannot go on: a non-finite gradient, nothing to train on, a checkpoint of another run."""


class RequestError(PolyrecError):
    """A recommendation request is invalid; `status` is the HTTP status that fits."""

    def __init__(self, code: str, message: str, remedy: str = "", status: int = 400) -> None:
        super().__init__(code, message, remedy)
        self.status = status


def closest(name: str, known: Iterable[str]) -> str:
    """«Did you mean 'x'?» with the nearest known name, or the list of known names when none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"Did you mean '{near[0]}'?"
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"Known: {shown}." if names else ""
