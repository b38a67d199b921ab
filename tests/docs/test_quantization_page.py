"""docs/quantization.md beside the code: flags and defaults, limits, errors, operations, and the Python that it shows."""

from __future__ import annotations

import ast
import re

import typer

from polyrec.cli.main import build_app
from polyrec.hardware.table import all_specs
from polyrec.models.options import ModelOptions
from polyrec.testing.tiny import write_tiny_model
from polyrec.verify import quality

from .blocks import DOCS, ROOT, blocks_of, run_python

PAGE = (DOCS / "quantization.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "polyrec"
OWN = [SOURCE / "models" / "quantization.py", SOURCE / "layers" / "linear.py", SOURCE / "verify" / "quality.py"]


def rows(heading):
    """Cells of the first table under a heading, quotes left out."""
    lines = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    cells = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return cells[2:]


def test_flags_and_defaults_are_the_settings():
    assert {row[1]: row[2] for row in rows("Flags")} == {name: str(value) for name, value in ModelOptions()}


def test_every_flag_is_one_of_each_command():
    group = typer.main.get_command(build_app())
    commands = [group.commands[name] for name in ("recommend", "serve", "evaluate")]
    commands.append(group.commands["verify"].commands["model"])
    flags = {flag for row in rows("Flags") for flag in row[0].split(", ")}
    assert len(flags) == 8
    for command in commands:
        assert flags <= {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


def test_limits():
    found = {row[0]: float(row[2]) for row in rows("What it costs in quality")}
    assert found == {
        "overlap": quality.LEAST_OVERLAP,
        "ndcg_kept with --data": quality.LEAST_NDCG_KEPT,
        "ndcg_kept without": quality.LEAST_BEST_KEPT,
    }


def raised(path):
    """Codes of the errors that a file makes."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id.endswith("Error") and isinstance(call.args[0], ast.Constant)
    }


def test_every_error_has_its_row():
    quantised = {code for code in raised(SOURCE / "models" / "checkpoint.py") if "quanti" in code}
    elsewhere = {"catalog_mismatch", "no_evaluation_users"}  # of any evaluation
    assert {row[0] for row in rows("Errors")} == quantised.union(*map(raised, OWN)) - elsewhere


def test_every_operation_exists():
    named = set(re.findall(r"`((?:linear|norm|act|rope)\.\w+)`", PAGE))
    assert named <= set(all_specs())
    assert len(named) == 10


def test_the_python(tmp_path):
    write_tiny_model(tmp_path / "model", num_items=40)
    (block,) = [one.text for one in blocks_of(PAGE) if one.language == "python"]
    assert "item-" in run_python(["-c", block], cwd=tmp_path)
