"""docs/hardware.md lists every code that the hardware layer raises or warns with, and no other, each with a test of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .blocks import DOCS, ROOT

SOURCE = ROOT / "src" / "polyrec"
PAGE = (DOCS / "hardware.md").read_text(encoding="utf-8")
KINDS = ("platform", "attention")  # the registries of hardware/base/registry.py
_CODE = re.compile(r"^[a-z][a-z0-9_]+$")
_WARNED = re.compile(r"^\[(\w+)\] ")


def error_names() -> set[str]:
    """PolyrecError and everything that derives from it, in the whole package."""
    classes = [
        node for path in SOURCE.rglob("*.py") for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)
    ]
    found = {"PolyrecError"}
    for _ in range(4):  # deep enough for any chain there is
        found |= {cls.name for cls in classes if any(isinstance(b, ast.Name) and b.id in found for b in cls.bases)}
    return found


def raised_codes() -> set[str]:
    """First arguments of errors under hardware, of HardwareErrors elsewhere, and the registry's, by kind."""
    names, codes = error_names(), set()
    for path in sorted(SOURCE.rglob("*.py")):
        if path == SOURCE / "core" / "registry.py":
            continue
        inside = SOURCE / "hardware" in path.parents
        for call in _calls(path):
            if _called(call) in (names if inside else {"HardwareError"}):
                assert call.args, f"{path}:{call.lineno} gives no code by position"
                code = call.args[0]
                literal = isinstance(code, ast.Constant) and isinstance(code.value, str)
                assert literal, f"{path}:{call.lineno}: {ast.unparse(code)} is no literal, so no table can be complete"
                assert isinstance(code, ast.Constant)
                assert _CODE.match(code.value), code.value
                codes.add(code.value)
    return codes | {f"{kind}{suffix}" for kind in KINDS for suffix in registry_suffixes()}


def registry_suffixes() -> set[str]:
    """`_unknown`, `_taken`, … of the codes that core/registry.py makes from its kind."""
    texts = [call.args[0] for call in _calls(SOURCE / "core" / "registry.py") if _called(call) == "RegistryError"]
    suffixes = set()
    for text in texts:
        assert isinstance(text, ast.JoinedStr)
        assert ast.unparse(text.values[0]).strip("'\"f{}") == "self.kind", ast.unparse(text)
        assert isinstance(text.values[1], ast.Constant)
        suffixes.add(text.values[1].value)
    return suffixes


def warned_codes() -> set[str]:
    """`[code]` at the beginning of every warning under hardware."""
    codes = set()
    for path in sorted((SOURCE / "hardware").rglob("*.py")):
        for call in _calls(path):
            if _called(call) in ("warning", "warn"):
                text = call.args[0]
                found = _WARNED.match(text.value) if isinstance(text, ast.Constant) else None
                assert found, f"{path}:{call.lineno} warns without a code"
                codes.add(found.group(1))
    return codes


def rows(heading: str) -> dict[str, tuple[str, str, str]]:
    """Code -> (when, what to do, test), of the table under a heading."""
    part = PAGE.split(f"\n### {heading}\n")[1].split("\n#")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines() if line.startswith("| `")
    ]
    assert all(len(row) == 4 for row in cells), [row for row in cells if len(row) != 4]
    codes = [row[0].strip("` ") for row in cells]
    assert len(codes) == len(set(codes)), "a code has two rows"
    return {code: (row[1], row[2], row[3].strip("` ")) for code, row in zip(codes, cells, strict=True)}


def test_every_error_has_its_row_and_every_row_its_error():
    assert set(rows("Errors")) == raised_codes()


def test_every_warning_has_its_row_and_every_row_its_warning():
    assert set(rows("Warnings")) == warned_codes()


@pytest.mark.parametrize("heading", ["Errors", "Warnings"])
def test_every_row_says_when_and_what_to_do(heading):
    assert all(when and todo for when, todo, _ in rows(heading).values())


@pytest.mark.parametrize("heading", ["Errors", "Warnings"])
def test_every_row_names_a_test_of_the_code(heading):
    for code, (_, _, test) in rows(heading).items():
        name, _, function = test.partition("::")
        path = ROOT / name
        assert path.is_file(), f"{code}: there is no {name}"
        defined = {node.name for node in ast.walk(_tree(path)) if isinstance(node, ast.FunctionDef)}
        assert function.startswith("test_"), test
        assert function in defined, f"{code}: {name} has no {function}"
        assert re.search(rf"\b{code}\b", path.read_text(encoding="utf-8")), f"{code} is not in {name}"


def test_the_collector_sees_what_is_there():
    """A few of each kind, so that an empty collection cannot pass for a complete one."""
    assert {
        "plugin_unknown",
        "platform_taken",
        "attention_path_invalid",
        "op_missing",
        "device_index",
    } <= raised_codes()
    assert {"op_fallback", "plugin_metadata_stale"} <= warned_codes()
    assert registry_suffixes() == {"_path_invalid", "_taken", "_unknown", "_import_failed", "_attribute_missing"}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call))


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
