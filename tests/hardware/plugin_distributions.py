"""Throw-away distributions: metadata and modules written into a folder that is put on the path, and taken off again."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

OPS, ATT = "polyrec.ops_plugin", "polyrec.att_plugin"
_numbers = count()

RMS_NORM = """
import torch

def rms_norm(x, weight, eps):
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).to(x.dtype)
"""
REGISTER = """
from polyrec.plugin_api import register_ops
register_ops(norm={"rms_norm": rms_norm})
"""


def unique(stem: str = "pkg") -> str:
    """A package name that no other test uses, so that no module of one test is found by another."""
    return f"throwaway_{stem}_{next(_numbers)}"


def write_distribution(
    folder: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str],
    version: str = "1.2.3",
    requires: tuple[str, ...] = (),
) -> Path:
    """Writes NAME-VERSION.dist-info and modules (dotted name -> text; a package is written as `name.__init__`)."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}", encoding="utf-8"
    )
    lines = [
        line
        for group, points in entry_points.items()
        for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for module, text in modules.items():
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


def write_plugin(
    folder: Path,
    plugin: str,
    text: str,
    *,
    returned: str | None = None,
    group: str = OPS,
    distribution: str | None = None,
    version: str = "1.2.3",
    package: str | None = None,
) -> str:
    """One plugin with one module `PACKAGE.work` of this text. returned: the expression its function returns. -> the package."""
    package = package or unique()
    work = f"{package}.work"
    modules = {
        f"{package}.__init__": "",
        f"{package}.register": f"def register():\n    return {returned or [work]!r}\n"
        if returned is None
        else f"from polyrec.plugin_api import Plugin\nWORK = {work!r}\n\ndef register():\n    return {returned}\n",
        work: text,
    }
    points = {group: {plugin: f"{package}.register:register"}}
    write_distribution(folder, distribution or f"{plugin.replace('_', '-')}-dist", points, modules, version)
    return package


@contextmanager
def on_path(*folders: Path) -> Iterator[None]:
    """The folders are first on the path, in this order; afterwards they and what was imported from them are gone."""
    before = set(sys.modules)
    sys.path[:0] = [str(folder) for folder in folders]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in folders:
            sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if name.startswith("throwaway_"):
                del sys.modules[name]
        importlib.invalidate_caches()
