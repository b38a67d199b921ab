"""Follows a page of docs: a line above each fenced block says, to reader and test alike, which file it goes to and how.

    New file `path`:                           the block is the whole file
    File `path`, written anew:                 the same, in the place of a file that is there
    In `path`, before `line`:                  inserted before the one line that reads so, indentation aside
    In `path`, after `line`:                   inserted after it
    In `path`, replace `line`:                 in the place of it

Blocks below any other line are shown only: commands and their output. Paths begin at the folder that the page is followed in.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest where the standard library lacks it

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^( *)(`{3,})(\w*)\s*$")
_NEW = re.compile(r"^New file `([^`]+)`:$")
_ANEW = re.compile(r"^File `([^`]+)`, written anew:$")
_EDIT = re.compile(r"^In `([^`]+)`, (before|after|replace) `([^`]+)`:$")
_MEANT = re.compile(r"^(New file|File|In) `[^`]+`.*:$")


@dataclass(frozen=True)
class Block:
    """A fenced block. above: the text line it stands under. language: of the fence, or empty. line: of its opening."""

    above: str
    language: str
    text: str
    line: int


def blocks_of(page: str) -> list[Block]:
    """All fenced blocks of a Markdown text, in order."""
    found: list[Block] = []
    above, opened, body = "", None, []
    for number, line in enumerate(page.splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened, body = (fence.group(1), fence.group(2), fence.group(3), number), []
        elif opened is None:
            above = line.strip() or above
        elif line.strip() == opened[1]:
            text = "".join(f"{part.removeprefix(opened[0])}\n" for part in body)
            found.append(Block(above, opened[2], text, opened[3]))
            above, opened = "", None
        else:
            body.append(line)
    assert opened is None, f"the block of line {opened[3]} is not closed"
    return found


def follow(page: str, folder: Path) -> list[str]:
    """Applies every marked block, in order, below `folder`; -> the paths written. A mark that cannot be followed fails."""
    written = []
    for block in blocks_of(page):
        if new := _NEW.match(block.above) or _ANEW.match(block.above):
            path = folder / new.group(1)
            there = bool(_ANEW.match(block.above))
            assert path.exists() == there, (
                f"line {block.line}: {new.group(1)} is {'not there' if there else 'there already'}"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            written.append(new.group(1))
        elif edit := _EDIT.match(block.above):
            name, how, anchor = edit.groups()
            _edit(folder / name, how, anchor, block)
            written.append(name)
        else:
            assert not _MEANT.match(block.above), f"line {block.line}: {block.above!r} is no mark that can be followed"
    return written


def _edit(path: Path, how: str, anchor: str, block: Block) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if line.strip() == anchor]
    assert len(places) == 1, f"line {block.line}: {path.name} has {len(places)} lines that read {anchor!r}, not one"
    start = places[0] + (how == "after")
    lines[start : places[0] + (how != "before")] = [block.text]
    path.write_text("".join(lines), encoding="utf-8")


def run_python(arguments: list[str], *path: Path, cwd: Path, variables: Mapping[str, str] | None = None) -> str:
    """Runs this Python in a process of its own with these folders first on its path; -> its output, which must be a success."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        **(variables or {}),
    }
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def install(folder: Path) -> None:
    """Writes beside a distribution's package the metadata that pip would, so that its folder on the path is an installation."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
