"""A folder on the path for throw-away distributions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_distributions import on_path


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """First on the path while the test runs."""
    folder = tmp_path / "site"
    folder.mkdir()
    with on_path(folder):
        yield folder
