"""Who a plugin is, and the error that says so. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...core.errors import HardwareError

Kind = Literal["ops", "att"]
GROUPS: dict[Kind, str] = {"ops": "polyrec.ops_plugin", "att": "polyrec.att_plugin"}
FLAGS: dict[Kind, str] = {"ops": "--extra-ops", "att": "--extra-att"}
KINDS: tuple[Kind, ...] = ("ops", "att")


@dataclass(frozen=True)
class PluginSource:
    """An entry point's name, with the distribution and version that it was installed from."""

    name: str
    distribution: str
    version: str
    kind: Kind = "ops"

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"

    @property
    def flag(self) -> str:
        """What a command was told to load it."""
        return f"{FLAGS[self.kind]} {self.name}"


class PluginError(HardwareError):
    """A fault of one installed plugin: the message begins with plugin, distribution and version."""

    def __init__(self, code: str, source: PluginSource, message: str, remedy: str) -> None:
        super().__init__(code, f"Plugin '{source.name}' ({source.distribution} {source.version}) {message}", remedy)
        self.source = source
