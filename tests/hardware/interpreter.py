"""Runs a file of kernel tests in a process of its own: Triton decides when it is imported whether to interpret."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
ON_DEVICE = {"TRITON_INTERPRET": "0"}


def passed(bodies: Path, environment: dict[str, str], *words: str, skips: bool = True) -> int:
    """How many tests of `bodies` passed; words: more for pytest. Fails with the whole report where one fails, or skips though
    none may."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(bodies), *words],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    report = done.stdout.strip().splitlines()[-1]
    assert skips or "skipped" not in report, report
    return int(re.search(r"(\d+) passed", report)[1])
