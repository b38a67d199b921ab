"""What probes read of the machine: files, environment, installed packages. One object, so that a test can stand in for all."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Machine:
    """root: where absolute paths begin. environment: variables. find: module name -> its spec, or None. load: imports it."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    find: Callable[[str], object | None] = importlib.util.find_spec
    load: Callable[[str], ModuleType] = importlib.import_module

    def exists(self, path: str) -> bool:
        """Whether an absolute path exists."""
        return self._at(path).exists()

    def read(self, path: str) -> str:
        """A text file; empty where it is absent or closed to this user."""
        try:
            return self._at(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def matches(self, pattern: str) -> list[str]:
        """Absolute paths that match a pattern such as /dev/name*, sorted."""
        return sorted(f"/{path.relative_to(self.root)}" for path in self.root.glob(pattern.lstrip("/")))

    def has_package(self, name: str) -> bool:
        """Whether a top-level module is installed; imports nothing."""
        return self.find(name) is not None

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")
