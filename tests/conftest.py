"""Shared by all tests: helper modules beside the tests are importable, and torch keeps to the cores there are."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE / "engine"), str(HERE / "hardware")]
