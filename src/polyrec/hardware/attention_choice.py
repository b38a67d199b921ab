"""Which attention a model gets: the one named, the plugin's, or the platform's first that supports the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import HardwareError, PolyrecError, closest
from .base.attention import AttentionBackend, AttentionNeeds
from .base.config import AUTO
from .base.registry import attention_names, load_attention
from .ops import PlatformOps

_log = logging.getLogger("polyrec.hardware")


@dataclass(frozen=True)
class PluginAttention:
    """An attention backend from a plugin. source: the plugin with distribution and version, as it is shown."""

    cls: type[AttentionBackend]
    source: str


@dataclass(frozen=True)
class AttentionChoice:
    """What `--attention` and `--extra-att` left to choose from on one platform. order: its built-in preference."""

    asked: str
    platform: str
    order: tuple[str, ...]
    plugins: Mapping[str, PluginAttention]

    def check(self) -> None:
        """Faults that need no model: `attention_unknown`, `attention_ambiguous`."""
        if self.asked == AUTO:
            if len(self.plugins) > 1:
                raise HardwareError(
                    "attention_ambiguous",
                    f"--extra-att loaded {len(self.plugins)} attention backends: {', '.join(sorted(self.plugins))}.",
                    f"Choose one with --attention {min(self.plugins)}.",
                )
        elif self.asked not in self.names():
            raise HardwareError(
                "attention_unknown",
                f"No attention backend is named '{self.asked}'. Known here: {', '.join(self.names())}.",
                f"{closest(self.asked, self.names())} A plugin's needs --extra-att.".strip(),
            )

    def names(self) -> list[str]:
        """Built-in names and those of the loaded plugins."""
        return sorted({*attention_names(), *self.plugins})

    def candidates(self) -> list[str]:
        """Names in the order in which `auto` tries them, or the one that was asked for."""
        return [*self.plugins, *self.order] if self.asked == AUTO else [self.asked]

    def load(self, name: str) -> type[AttentionBackend]:
        """The class behind a name."""
        cls: Any = self.plugins[name].cls if name in self.plugins else load_attention(name)
        if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
            raise HardwareError("attention_not_a_backend", f"Attention '{name}' is {cls!r}, not an AttentionBackend.")
        return cls

    def select(self, needs: AttentionNeeds) -> str:
        """The name of the first candidate that supports the model; `attention_unsupported` names one that could."""
        lacking: dict[str, list[str]] = {}
        for name in self.candidates():
            if not (lacks := self._lacks(name, needs)):
                for other, missed in lacking.items():
                    if other not in self.plugins:  # the platform's own order goes from the fastest to the most able
                        continue
                    _log.warning(
                        "[attention_passed_over] Attention '%s' does not support %s; '%s' is used.",
                        other,
                        ", ".join(missed),
                        name,
                    )
                return name
            lacking[name] = lacks
        able = [name for name in self.names() if name not in lacking and self._could(name, needs)]
        tried = "; ".join(f"'{name}' does not support {', '.join(lacks)}" for name, lacks in lacking.items())
        raise HardwareError(
            "attention_unsupported",
            f"The model cannot run here: {tried}.",
            f"Use --attention {able[0]}."
            if able
            else "No attention backend installed here can: load a plugin (--extra-att).",
        )

    def _lacks(self, name: str, needs: AttentionNeeds) -> list[str]:
        """What a candidate cannot do; a platform that lists it in its order says that it runs there, given its package."""
        try:
            support = self.load(name).support
        except PolyrecError as error:
            missing = error.__cause__
            if self.asked == AUTO and name in self.order and isinstance(missing, ModuleNotFoundError):
                return [f"anything without the package '{missing.name}'"]
            raise
        return support.lacks(needs, None if name in self.order else self.platform)

    def _could(self, name: str, needs: AttentionNeeds) -> bool:
        """Whether a backend that nobody asked for would do; one that cannot be loaded would not."""
        try:
            return not self._lacks(name, needs)
        except PolyrecError:
            return False

    def build(self, needs: AttentionNeeds, ops: PlatformOps) -> AttentionBackend:
        """Selects and constructs."""
        return self.load(self.select(needs))(needs, ops)
