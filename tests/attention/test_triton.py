"""Runs the conformance suite, and prompts in pages, on our Triton attention in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from interpreter import INTERPRETED, ON_DEVICE, passed

BODIES = Path(__file__).with_name("triton_bodies.py")
PROMPTS = Path(__file__).with_name("triton_prompt_bodies.py")
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is made for Linux only")
DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda")


@LINUX
def test_in_the_interpreter():
    """It multiplies bf16 wrongly; the tiny engine's heads are smaller than any that the kernels take."""
    chosen = "not bfloat16 and not gradients and not engine and not branches and not float16"
    assert passed(BODIES, INTERPRETED, "-k", chosen) >= 10


@LINUX
def test_prompts_in_the_interpreter():
    assert passed(PROMPTS, INTERPRETED) >= 15


@pytest.mark.gpu
@DEVICE
def test_on_the_device():
    assert passed(BODIES, ON_DEVICE) >= 20


@pytest.mark.gpu
@DEVICE
def test_prompts_on_the_device():
    assert passed(PROMPTS, ON_DEVICE, skips=False) >= 15
