"""Makes the recorder, and the small shop of the training tests, importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "training")]
