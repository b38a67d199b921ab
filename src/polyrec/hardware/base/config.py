"""What a command, or a caller in Python, says about hardware: the flags of every command that builds a backend. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from ...core.config import Settings

AUTO = "auto"
Fallback = Literal["strict", "warn", "allow"]
Verify = Literal["off", "quick", "full"]
Purpose = Literal["infer", "train"]


class HardwareConfig(Settings):
    """hardware_platform: a registered name, or auto (the accelerator whose probe answers yes, else the CPU).

    device: TYPE[:INDEX] as torch spells it; it implies the platform. gpu: index of the platform's device, whatever the
    platform. allow_cpu: auto may take the CPU although an accelerator's probe failed. extra_ops, extra_att: plugins to
    load, by entry-point name. op: field -> plugin, which settles two plugins for one field. attention: a backend's name,
    or auto. fallback: what happens when a tier D operation is missing: refused, decomposed and reported, or decomposed in
    silence (counted all the same). verify_plugins: how much a plugin's numbers are checked before it is used. purpose:
    train asks for gradients.
    """

    hardware_platform: str = AUTO
    device: str | None = None
    gpu: int | None = Field(default=None, ge=0)
    allow_cpu: bool = False
    extra_ops: tuple[str, ...] = ()
    extra_att: tuple[str, ...] = ()
    op: dict[str, str] = Field(default_factory=dict)
    attention: str = AUTO
    fallback: Fallback = "warn"
    verify_plugins: Verify = "quick"
    purpose: Purpose = "infer"

    @field_validator("extra_ops", "extra_att", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        """`a,b` as well as a list, in which each may hold commas too; each name once."""
        if isinstance(value, str):
            value = [value]
        if not (isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)):
            return value
        return tuple(dict.fromkeys(name.strip() for text in value for name in text.split(",") if name.strip()))

    @field_validator("op", mode="before")
    @classmethod
    def _split_pins(cls, value: Any) -> Any:
        """`group.field=plugin` texts, one or several, as well as a mapping."""
        if isinstance(value, str):
            value = [part for part in value.split(",") if part.strip()]
        if isinstance(value, Mapping) and all(isinstance(text, str) for pin in value.items() for text in pin):
            value = [f"{field}={name}" for field, name in value.items()]
        if not isinstance(value, (list, tuple)):
            return value
        pins = [str(text).partition("=") for text in value]
        if bad := [f"{field}{equals}{name}" for field, equals, name in pins if not (field.strip() and name.strip())]:
            raise ValueError(f"{bad[0]!r} is not of the form norm.rms_norm=plugin")
        found: dict[str, str] = {}
        for field, name in ((field.strip(), name.strip()) for field, _, name in pins):
            if found.setdefault(field, name) != name:
                raise ValueError(f"{field!r} is given to {found[field]!r} and to {name!r}")
        return found
