"""The repository as the project's checks read it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest where the standard library lacks it

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "polyrec"


def pyproject() -> dict[str, Any]:
    """pyproject.toml, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def source_files(folder: Path = SOURCE) -> list[Path]:
    """All Python files under a folder, sorted."""
    return sorted(folder.rglob("*.py"))


def relative(path: Path) -> str:
    """A source file's path inside the package, with forward slashes."""
    return path.relative_to(SOURCE).as_posix()


def module_names() -> list[str]:
    """The dotted names of all modules of the package, sorted."""
    parts = (path.relative_to(SOURCE.parent).with_suffix("").parts for path in source_files())
    return sorted(".".join(part).removesuffix(".__init__") for part in parts)


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_roots(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of each absolute import, wherever it stands in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]
