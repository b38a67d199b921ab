"""docs/hardware.md beside the code: platforms, operations, and the Python that it shows."""

from __future__ import annotations

import re

import pytest

from polyrec.hardware import platform_names
from polyrec.hardware.choose import platform_class
from polyrec.hardware.table import all_specs
from polyrec.testing.tiny import write_tiny_model

from .blocks import DOCS, ROOT, blocks_of, install, run_python

PAGE = (DOCS / "hardware.md").read_text(encoding="utf-8")
PAGES = ["hardware.md", "adding-an-op.md", "adding-a-backend.md", "writing-a-plugin.md"]


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    lines = PAGE.split(f"\n{heading}\n")[1].splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def test_every_platform_is_listed_with_its_device_type_and_status():
    rows = {row[0]: row for row in table("## Platforms")}
    assert set(rows) == set(platform_names())
    for name, row in rows.items():
        cls = platform_class(name)
        assert row[2] == cls.device_type
        unproven = cls.remark == "Written, not run on this hardware."
        assert (row[3] == "written, not run on this hardware") == unproven


def test_every_operation_is_listed_as_it_is_specified():
    found = {row[0]: (row[2], row[3], row[4]) for row in table("## Operations")}
    expected = {field: (spec.tier, ", ".join(spec.modes), ", ".join(spec.needs)) for field, spec in all_specs().items()}
    assert found == expected


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, and the example plugin as if it were installed."""
    folder = tmp_path_factory.mktemp("hardware")
    example = ROOT / "examples" / "polyrec-example-plugin"
    (folder / "plugin").mkdir()
    (folder / "plugin" / "pyproject.toml").write_bytes((example / "pyproject.toml").read_bytes())
    install(folder / "plugin")
    write_tiny_model(folder / "model", num_items=40)
    return folder, folder / "plugin", example


@pytest.mark.parametrize("block", [one.text for one in blocks_of(PAGE) if one.language == "python"])
def test_its_python_runs(place, block):
    folder, *path = place
    run_python(["-c", block], *path, cwd=folder)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (DOCS / name).resolve() if name else DOCS / page
        assert path.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in anchors, target
