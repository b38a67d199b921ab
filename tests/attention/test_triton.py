"""Runs the conformance suite on our Triton attention in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BODIES = Path(__file__).with_name("triton_bodies.py")


def run_bodies(*words: str, **environment: str) -> int:
    """How many tests passed; fails with the whole report where one fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(BODIES), *words],
        env={**os.environ, **environment},
        cwd=BODIES.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is made for Linux only")
def test_in_the_interpreter():
    """It multiplies bf16 wrongly; the tiny engine's heads are smaller than any that the kernels take."""
    chosen = "not bfloat16 and not gradients and not engine and not branches and not float16"
    assert run_bodies("-k", chosen, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="") >= 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda")
def test_on_the_device():
    assert run_bodies(TRITON_INTERPRET="0") >= 20
