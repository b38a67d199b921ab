"""Reads a plugin's Python files without importing any of them: where a module lies, and what its text says when it is literal.

Only the finders of top-level names run, so editable installs are found too; the rest is files and syntax trees. No torch.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

Value = Any  # a text, or a tuple of such values
_BRANCHES = (ast.If, ast.Try, ast.For, ast.While, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class SourceFault(Exception):
    """A module's text cannot be had; the message says why."""


@dataclass(frozen=True)
class Source:
    """One module's text. package: what a relative import in it starts from."""

    name: str
    path: Path
    package: str
    tree: ast.Module

    @cached_property
    def names(self) -> dict[str, Value]:
        """Names that the module gives a literal value, at its top level, and assigns nowhere else."""
        stored = Counter(
            node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        known: dict[str, Value] = {"__name__": self.name, "__package__": self.package}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target, assigned = node.targets[0], node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                target, assigned = node.target, node.value
            else:
                continue
            if isinstance(target, ast.Name) and stored[target.id] == 1:
                value = literal(assigned, known)
                known.update({} if value is None else {target.id: value})
        return known

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Local name -> (module, attribute) of every `from module import attribute`, wherever it stands."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (module := self.absolute(node)) is not None:
                found.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})
        return found

    def absolute(self, node: ast.ImportFrom) -> str | None:
        """The module that a `from` names; None if it leads out of the top-level package."""
        if not node.level:
            return node.module
        parts = self.package.split(".")
        if node.level > len(parts):
            return None
        base = parts[: len(parts) - node.level + 1]
        return ".".join([*base, node.module] if node.module else base)

    def may_bind(self, name: str) -> bool:
        """Whether running the module may give it this name: by assignment, definition or import, `*` included."""
        bound: set[str | None] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                bound.add(node.name)
            elif isinstance(node, ast.alias):
                bound.add(node.asname or node.name)
        return bool(bound & {name, "*"})

    def original(self, node: ast.expr) -> str:
        """The last name of what an expression refers to, an `import … as` undone."""
        if isinstance(node, ast.Attribute):
            return node.attr
        name = node.id if isinstance(node, ast.Name) else ""
        return self.imported.get(name, ("", name))[1]


def read_source(module: str) -> Source:
    """Error: `SourceFault`."""
    path, is_package = _locate(module)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise SourceFault(f"'{module}' cannot be read: {error}") from error
    return Source(module, path, module if is_package else module.rpartition(".")[0], tree)


def literal(node: ast.expr, names: dict[str, Value]) -> Value | None:
    """A text, or a tuple of them, that follows from constants and `names`; None if it is decided when it runs."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, (ast.List, ast.Tuple)):
        return _all(literal(part, names) for part in node.elts)
    if isinstance(node, ast.JoinedStr):
        parts = _all(_piece(part, names) for part in node.values)
        return None if parts is None else "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = _all(literal(part, names) for part in (node.left, node.right))
        return None if sides is None or type(sides[0]) is not type(sides[1]) else sides[0] + sides[1]
    return None


def _piece(node: ast.expr, names: dict[str, Value]) -> str | None:
    """One part of an f-string."""
    if isinstance(node, ast.FormattedValue):
        value = None if node.format_spec or node.conversion != -1 else literal(node.value, names)
    else:
        value = literal(node, names)
    return value if isinstance(value, str) else None


def at_import(body: list[ast.stmt], certain: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every node that runs when the module is imported, and whether it runs in any case (no branch, no loop around it)."""
    for statement in body:
        yield from _running(statement, certain)


def _running(node: ast.AST, certain: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, certain
    for child in ast.iter_child_nodes(node):
        if isinstance(node, _FUNCTIONS) and child not in getattr(node, "decorator_list", ()):
            continue
        yield from _running(child, certain and not isinstance(node, _BRANCHES))


def _all(values: Iterable[Value | None]) -> tuple[Value, ...] | None:
    found = tuple(values)
    return None if None in found else found


def _locate(module: str) -> tuple[Path, bool]:
    """A module's file, and whether it is a package's."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ValueError, ImportError) as error:
        raise SourceFault(f"'{top}' cannot be found: {error}") from error
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    if spec is None or name != module:
        raise SourceFault(f"module '{module}' is not installed: there is no '{name}'")
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise SourceFault(f"module '{module}' has no Python source ({spec.origin or 'a folder without __init__.py'})")
    return Path(spec.origin), spec.submodule_search_locations is not None
