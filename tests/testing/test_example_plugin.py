"""examples/polyrec-example-plugin, put on the path as pip would: its check runs, and it passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLE = Path(__file__).parents[2] / "examples" / "polyrec-example-plugin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment in which the example is installed: its folder, and the metadata that its pyproject.toml makes."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    site = tmp_path_factory.mktemp("site")
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{EXAMPLE}", "OMP_NUM_THREADS": "1"}


def test_the_operation_is_called_and_recommendations_stay(environment):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "check.py")], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same 20 items" in done.stdout
    assert "norm.rms_norm is polyrec_example_plugin.ops:rms_norm of example_ops" in done.stdout


def test_it_passes_its_own_tests(environment):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(EXAMPLE / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_the_readme_names_files_and_flags_that_are_there():
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    listed = [line.split("](")[1].split(")")[0] for line in text.splitlines() if line.startswith("| [")]
    assert len(listed) == 6
    assert [path for path in listed if not (EXAMPLE / path).is_file()] == []
