"""Renews `torch_npu_schemas.yaml` from torch_npu's wheels: python -m tests.hardware.backends.ascend.renew_schemas WHEEL...

Run it where the platform begins to use another function, or for another version. The wheels are read, not installed.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import yaml

from .published import FIXTURE, PLAIN, source_uses

SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
NOTE = """\
# What the Ascend platform uses of torch_npu, as its wheels publish it: schemas of functions (which they list in
# csrc/aten/npu_native_functions_by_codegen.yaml), signatures of Python names. Written by renew_schemas.py.
"""


def main(wheels: list[str]) -> None:
    names = sorted({use.name for use in source_uses()})
    versions = {version_of(wheel): read(Path(wheel), names) for wheel in wheels}
    text = yaml.safe_dump(versions, sort_keys=True, width=120, allow_unicode=True)
    FIXTURE.write_text(NOTE + text, encoding="utf-8")


def version_of(wheel: str) -> str:
    """`2.9.1` of torch_npu-2.9.1-cp311-….whl."""
    return Path(wheel).name.split("-")[1]


def read(wheel: Path, names: Iterable[str]) -> dict[str, str]:
    """Name -> schema, signature or `attribute`; names that the wheel does not have are left out."""
    with zipfile.ZipFile(wheel) as archive:
        listed = set(archive.namelist())
        schemas = _schemas(archive.read(SCHEMAS).decode())
        sources = {
            name: archive.read(name).decode()
            for name in listed
            if re.fullmatch(r"torch_npu/(__init__|npu/\w+|profiler/\w+)\.py", name)
        }
    found = {name: schemas.get(name) or _python(name, sources) for name in names}
    return {name: text for name, text in found.items() if text}


def _schemas(text: str) -> dict[str, str]:
    """Function, with its overload -> schema."""
    lines = re.findall(r"^[ -]*func: (\S+?)(\(.*)$", text, flags=re.MULTILINE)
    return {name: name + rest.strip() for name, rest in lines}


def _python(name: str, sources: dict[str, str]) -> str | None:
    """`npu.Event.record` -> the signature of that method, without self; a plain name that the sources have: `attribute`."""
    module, _, path = name.partition(".")
    if not path:
        in_top = re.search(rf"import {name}\b|^{name} =", sources["torch_npu/__init__.py"], flags=re.MULTILINE)
        return PLAIN if in_top else None
    first, *rest = path.split(".")
    package = f"torch_npu/{module}/__init__.py"
    files = {file: ast.parse(text) for file, text in sources.items() if file.startswith(f"torch_npu/{module}/")}
    if package not in files or not _exports(files[package], first, files, f"torch_npu/{module}/"):
        return None
    for tree in [files[package], *files.values()]:
        for node in tree.body:
            if getattr(node, "name", None) == first:
                return _signature(node, rest)
    own = (text for file, text in sources.items() if file in files)
    return PLAIN if any(re.search(rf"\b{re.escape(path)}\b", text) for text in own) else None


def _exports(package: ast.Module, name: str, files: dict[str, ast.Module], folder: str) -> bool:
    for node in package.body:
        if getattr(node, "name", None) == name:
            return True
        if isinstance(node, ast.ImportFrom):
            exported = {alias.asname or alias.name for alias in node.names}
            source = files.get(f"{folder}{node.module}.py")
            if name in exported or (
                "*" in exported and source and any(getattr(n, "name", 0) == name for n in source.body)
            ):
                return True
    return False


def _signature(node: ast.stmt, rest: list[str]) -> str | None:
    """Of a function, of a class (its __new__ or __init__), or of what `rest` names inside it."""
    if isinstance(node, ast.FunctionDef):
        return None if rest else f"({ast.unparse(node.args)})"
    assert isinstance(node, ast.ClassDef)
    methods = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
    makers = [methods[name] for name in ("__init__", "__new__") if name in methods]
    # Of the two, the one that takes something; the other hands everything on.
    method = methods.get(rest[0]) if rest else max(makers, key=lambda maker: len(maker.args.args), default=None)
    if method is None:
        return None
    static = any(
        isinstance(decorator, ast.Name) and decorator.id == "staticmethod" for decorator in method.decorator_list
    )
    if not static:
        method.args.args = method.args.args[1:]
    return f"({ast.unparse(method.args)})"


if __name__ == "__main__":
    main(sys.argv[1:])
