"""Runs the conformance suite on our Triton attention in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from interpreter import INTERPRETED, ON_DEVICE, passed

BODIES = Path(__file__).with_name("triton_bodies.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is made for Linux only")
def test_in_the_interpreter():
    """It multiplies bf16 wrongly; the tiny engine's heads are smaller than any that the kernels take."""
    chosen = "not bfloat16 and not gradients and not engine and not branches and not float16"
    assert passed(BODIES, INTERPRETED, "-k", chosen) >= 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda")
def test_on_the_device():
    assert passed(BODIES, ON_DEVICE) >= 20
