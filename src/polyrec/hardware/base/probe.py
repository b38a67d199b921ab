"""The answer of a platform to the question whether this machine can run it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProbeState = Literal["usable", "absent", "failed"]


@dataclass(frozen=True)
class Probe:
    """state: usable; absent (no sign of such a device here); failed (a device or its driver is here and cannot be used).

    reason: why not, with what to do; for a usable platform, what a user should know. devices: a name for each index.
    """

    state: ProbeState
    reason: str = ""
    devices: tuple[str, ...] = ()

    @classmethod
    def usable(cls, devices: tuple[str, ...], note: str = "") -> Probe:
        return cls("usable", note, devices)

    @classmethod
    def absent(cls, reason: str) -> Probe:
        return cls("absent", reason)

    @classmethod
    def failed(cls, reason: str) -> Probe:
        return cls("failed", reason)
