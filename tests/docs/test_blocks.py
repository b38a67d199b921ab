"""The reader of the pages: it does what a mark says, and refuses what it cannot follow."""

from __future__ import annotations

import pytest

from .blocks import blocks_of, follow

PAGE = """
New file `new/one.py`:

```python
one = 1
```

In `old.py`, after `second`:

```python
inserted
```

Shown only:

```bash
rm -rf everything
```
"""


def marked(mark: str) -> str:
    return f"{mark}\n\n```python\nX\n```\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "old.py").write_text("first\n    second\nthird\nthird\n")
    return tmp_path


def test_marked_blocks_are_applied_and_others_are_not(folder):
    assert follow(PAGE, folder) == ["new/one.py", "old.py"]
    assert (folder / "new" / "one.py").read_text() == "one = 1\n"
    assert (folder / "old.py").read_text() == "first\n    second\ninserted\nthird\nthird\n"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("before", "X\nfirst\n    second\nthird\nthird\n"),
        ("after", "first\nX\n    second\nthird\nthird\n"),
        ("replace", "X\n    second\nthird\nthird\n"),
    ],
)
def test_where_a_block_goes(folder, how, expected):
    follow(marked(f"In `old.py`, {how} `first`:"), folder)
    assert (folder / "old.py").read_text() == expected


def test_a_file_written_anew(folder):
    follow(marked("File `old.py`, written anew:"), folder)
    assert (folder / "old.py").read_text() == "X\n"


@pytest.mark.parametrize(
    "mark",
    [
        "In `old.py`, before `third`:",  # twice
        "In `old.py`, before `fourth`:",  # not there
        "In `old.py`, before `secon`:",  # only part of a line
        "New file `old.py`:",  # there already
        "File `new.py`, written anew:",  # not there
        "In `old.py`, somewhere near `first`:",  # not a mark
    ],
)
def test_what_cannot_be_followed_fails(folder, mark):
    with pytest.raises(AssertionError):
        follow(marked(mark), folder)


def test_a_block_that_is_not_closed_fails():
    with pytest.raises(AssertionError):
        blocks_of("```python\nx\n")


def test_blocks_in_lists_lose_their_indentation():
    (block,) = blocks_of("1. Do:\n\n   ```python\n   if x:\n       y\n   ```\n")
    assert block.text == "if x:\n    y\n"
    assert block.language == "python"
