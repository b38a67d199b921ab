"""Records which functions of Polyrec are entered, in order and in all threads; reads the paths documented in docs/tour.md."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import polyrec

PACKAGE = Path(polyrec.__file__).parent
TOUR = PACKAGE.parents[1] / "docs" / "tour.md"
# A numbered step of the tour: [file](link) and the function in it that the path enters.
_STEP = re.compile(r"^\d+\. \[`([\w/.]+)`\]\(([^)]+)\) `(\w+)`", re.MULTILINE)

Step = tuple[str, str]


class Recorder:
    """calls: (file inside the package, function) of every entry while `active`."""

    def __init__(self) -> None:
        self.calls: list[Step] = []
        self.active = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.active or event != "call":
            return
        path = frame.f_code.co_filename
        if path.startswith(str(PACKAGE)):
            self.calls.append((Path(path).relative_to(PACKAGE).as_posix(), frame.f_code.co_name))

    def first_entries(self, among: list[Step]) -> list[Step]:
        """The steps of `among` in the order in which each was first entered."""
        wanted = set(among)
        return list(dict.fromkeys(call for call in self.calls if call in wanted))

    def files(self) -> set[str]:
        """Every file entered."""
        return {file for file, _ in self.calls}

    def count(self, file: str, function: str) -> int:
        """How often a function was entered."""
        return self.calls.count((file, function))


@contextmanager
def recording() -> Iterator[Recorder]:
    """A recorder that sees this thread and all threads started inside; set `active` to begin."""
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        yield recorder
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        recorder.active = False


def tour_section(title: str) -> str:
    """The text of one `##` section of the tour."""
    text = TOUR.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/tour.md has no section '{title}'"
    return found[1]


def documented_steps(title: str) -> list[Step]:
    """The numbered steps of a section, in order."""
    return [(file, function) for file, _, function in _STEP.findall(tour_section(title))]


def documented_files(title: str) -> set[str]:
    """Every file of the package that a section links to."""
    links = re.findall(r"\]\(\.\./src/polyrec/([\w/.]+\.py)\)", tour_section(title))
    return set(links)
