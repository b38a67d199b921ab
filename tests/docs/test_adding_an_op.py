"""docs/adding-an-op.md, followed literally on a copy of the tree: the new field and group are there, run, and are checked."""

from __future__ import annotations

import json
import shutil

import pytest

from .blocks import DOCS, ROOT, blocks_of, follow, run_python

PAGE = (DOCS / "adding-an-op.md").read_text(encoding="utf-8")
FIELDS = {"norm.gated_rms_norm": "D", "embed.sum_rows": "R"}

CHECK = """
import sys
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.ops.check import check_op
from polyrec.hardware.table import all_specs
backend = build_hardware_backend(HardwareConfig(hardware_platform="cpu", purpose="train"))
for field in sys.argv[1:]:
    group, _, name = field.partition(".")
    function = getattr(getattr(backend.ops, group), name)
    faults = check_op(field, all_specs()[field], function, runtime=backend.runtime, graph=backend.graph,
                      dtypes=backend.capabilities.dtypes, train=True, level="full")
    print(field, [str(fault) for fault in faults])
"""

# A platform of its own, which composes its groups from single fields and has not heard of the new ones.
LACKING = """
import logging, torch
from dataclasses import replace
from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.cpu import CpuBackend
from polyrec.hardware.ops import REFERENCE_OPS, partial_ops
from polyrec.hardware.ops.spec import MISSING, group_specs, partial_group
from polyrec.hardware.table import resolve

class Mine(CpuBackend):
    platform_name = "mine"

known = {name: getattr(REFERENCE_OPS, name) for name in vars(REFERENCE_OPS) if name != "embed"}
known["norm"] = replace(REFERENCE_OPS.norm, gated_rms_norm=MISSING)
try:
    resolve(Mine, partial_ops(**known), {}, "warn", "infer")
except HardwareError as error:
    print(error.code, "|", error)
table = resolve(Mine, partial_ops(**known, embed=REFERENCE_OPS.embed), {}, "warn", "infer")
row = table.row("norm.gated_rms_norm")
x, gate, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
found = table.ops.norm.gated_rms_norm(x, gate, weight, 1e-6)
expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight * gate * torch.sigmoid(gate)
print(row.origin, row.source, row.fallback, table.fallback_calls()["norm.gated_rms_norm"])
torch.testing.assert_close(found, expected)
try:
    resolve(Mine, partial_ops(**known, embed=REFERENCE_OPS.embed), {}, "strict", "infer")
except HardwareError as error:
    print(error.code, "|", error)
"""

# Every platform of the tree, with a stand-in where a vendor's library is not installed.
PLATFORMS = """
from unittest.mock import MagicMock
from polyrec.hardware import platform_names
from polyrec.hardware.backends.cpu.graph import CpuGraph
from polyrec.hardware.backends.cpu.runtime import CpuRuntime
from polyrec.hardware.base.backend import Capabilities
from polyrec.hardware.choose import platform_class
from polyrec.hardware.table import resolve

host = {"runtime": CpuRuntime(), "graph": CpuGraph()}  # torch knows the devices only with the library
for name in platform_names():
    cls = platform_class(name)
    parts = {"musa": {"capabilities": Capabilities(), **host}, "ascend": {"library": MagicMock(), **host}}.get(name, {})
    table = resolve(cls, cls(**parts).ops, {}, "allow", "infer")
    print(name, table.row("embed.sum_rows").origin, table.row("norm.gated_rms_norm").origin)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the package with the page applied."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    assert follow(PAGE, folder)
    return folder


def python(tree, *arguments: str) -> str:
    return run_python(list(arguments), tree / "src", cwd=tree)


def test_the_copy_is_what_runs(tree):
    assert str(tree) in python(tree, "-c", "import polyrec; print(polyrec.__file__)")


def test_devices_lists_the_fields_with_origin_and_tier(tree):
    report = json.loads(python(tree, "-m", "polyrec.cli.main", "devices", "--json", "--hardware-platform", "cpu"))
    rows = {row["field"]: row for row in report["chosen"]["ops"]}
    assert {field: rows[field]["tier"] for field in FIELDS} == FIELDS
    assert rows["norm.gated_rms_norm"]["origin"] == "reference"
    assert rows["embed.sum_rows"]["origin"] == "built-in"
    assert rows["embed.sum_rows"]["implementation"] == "polyrec.hardware.backends.cpu.ops.embed:sum_rows"
    assert not any(rows[field]["fallback"] for field in FIELDS)


def test_the_cpu_runs_them_and_they_pass_the_full_check(tree):
    assert python(tree, "-c", CHECK, *FIELDS).splitlines() == [f"{field} []" for field in FIELDS]


def test_a_platform_without_the_required_field_is_refused_and_without_the_other_falls_back(tree):
    refused, fallback, strict = python(tree, "-c", LACKING).splitlines()
    assert refused.startswith("op_missing |")
    assert "embed.sum_rows (required)" in refused
    assert "gated_rms_norm" not in refused
    assert fallback == "decomposed norm.rms_norm True 1"
    assert strict.startswith("op_missing |")
    assert "norm.gated_rms_norm (would fall back" in strict


def test_every_platform_of_the_tree_still_constructs_and_has_them(tree):
    found = {line.split()[0]: line.split()[1:] for line in python(tree, "-c", PLATFORMS).splitlines()}
    assert found.pop("ascend") == ["reference", "decomposed"]
    assert found.pop("cpu") == ["built-in", "reference"]
    assert set(found) >= {"nvidia", "metax", "rocm", "musa", "xpu"}
    assert set(map(tuple, found.values())) == {("reference", "reference")}


def test_the_pages_own_tests_pass(tree):
    out = python(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", "tests/hardware")
    assert "failed" not in out
    assert "skipped" not in out


def test_the_pages_benchmark_runs(tree):
    out = python(tree, "benchmarks/sum_rows.py", "--calls", "1").splitlines()
    assert [line.split(": ")[1].split()[0] for line in out] == ["reference", "cpu", "reference", "cpu"]


def test_blocks_that_are_not_files_are_commands():
    shown = [block for block in blocks_of(PAGE) if not block.above.startswith(("In `", "New file `"))]
    assert [block.language for block in shown] == ["bash"]
