"""Names for things that are imported late: a name stands for a path `module:attribute` until somebody asks for it.

Platforms, models and attention backends each keep one. Listing names imports nothing, so a broken entry hurts only
the one who chooses it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from .errors import PolyrecError, closest


class RegistryError(PolyrecError):
    """A name that is unknown, claimed twice, or whose module does not give what it promised.

    Codes begin with the registry's kind: `platform_unknown`, `model_taken`, `attention_import_failed`, …
    """


class Registry:
    """Names of one kind ("platform", "model", "attention") -> `module:attribute`, imported when first loaded."""

    def __init__(self, kind: str, paths: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._paths: dict[str, str] = {}
        for name, path in (paths or {}).items():
            self.register(name, path)

    def register(self, name: str, path: str) -> None:
        """Claims a name; the same claim twice is one, a different path for a claimed name is `KIND_taken`."""
        module, _, attribute = path.partition(":")
        parts = [*module.split("."), *attribute.split(".")]
        if not name or not all(part.isidentifier() for part in parts):
            raise RegistryError(
                f"{self.kind}_path_invalid",
                f"The {self.kind} '{name}' is registered as '{path}'.",
                "Write 'package.module:attribute'.",
            )
        if self._paths.setdefault(name, path) != path:
            raise RegistryError(
                f"{self.kind}_taken",
                f"The {self.kind} '{name}' is already '{self._paths[name]}', now '{path}' claims it too.",
                "Give one of them another name, or install only one.",
            )

    def path(self, name: str) -> str:
        """The path behind a name, nothing imported; an unknown name is `KIND_unknown`."""
        if name not in self._paths:
            raise RegistryError(
                f"{self.kind}_unknown",
                f"No {self.kind} is named '{name}'. Known: {', '.join(self.names()) or 'none'}.",
                near if (near := closest(name, self._paths)).startswith("Did") else "Name one of them.",
            )
        return self._paths[name]

    def load(self, name: str) -> Any:
        """Imports what a name stands for.

        `KIND_import_failed` (its module, or one that it needs, did not import) and `KIND_attribute_missing` keep the cause.
        """
        path = self.path(name)
        module_name, _, attribute = path.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
        # A vendor's module may fail in any way: a missing library, a driver that refuses, an exit.
        except (Exception, SystemExit) as error:
            lacking = getattr(error, "name", None) or module_name
            raise RegistryError(
                f"{self.kind}_import_failed",
                f"The {self.kind} '{name}' is '{path}', and importing it failed: {type(error).__name__}: {error}.",
                f"Install what '{lacking}' belongs to, or choose another {self.kind}.",
            ) from error
        try:
            for part in attribute.split("."):
                found = getattr(found, part)
        except AttributeError as error:
            raise RegistryError(
                f"{self.kind}_attribute_missing",
                f"The {self.kind} '{name}' is '{path}', but {error}.",
                f"Correct the path registered for '{name}', or install the version that has it.",
            ) from error
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def names(self) -> list[str]:
        """All names in alphabetical order; imports nothing."""
        return sorted(self._paths)
