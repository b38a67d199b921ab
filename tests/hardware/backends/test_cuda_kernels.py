"""Runs the kernels' tests (`kernel_bodies.py`) in Triton's interpreter, and on a device; and what needs no kernel to run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreter import INTERPRETED, ON_DEVICE, passed

from polyrec.hardware.backends import cuda_like
from polyrec.hardware.backends.cuda_like import CUDA_LIKE_OPS, NvidiaBackend, cuda_like_ops
from polyrec.hardware.backends.machine import Machine
from polyrec.hardware.base.backend import Capabilities

BODIES = Path(__file__).with_name("kernel_bodies.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is made for Linux only")
def test_kernels_in_the_interpreter():
    assert passed(BODIES, INTERPRETED) > 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda")
def test_kernels_on_the_device():
    assert passed(BODIES, ON_DEVICE, skips=False) > 150


@pytest.mark.parametrize("fp8", [False, True])
def test_without_triton_operations_are_torchs_own(monkeypatch, fp8):
    monkeypatch.setattr(Machine, "has_package", lambda machine, name: name != "triton")
    assert NvidiaBackend(capabilities=Capabilities(fp8=fp8)).ops is CUDA_LIKE_OPS


@pytest.mark.parametrize("fp8", [False, True])
def test_triton_is_chosen_when_the_platform_is_built(monkeypatch, fp8):
    monkeypatch.setattr(Machine, "has_package", lambda machine, name: True)
    ops = NvidiaBackend(capabilities=Capabilities(fp8=fp8)).ops
    assert ops is cuda_like_ops(triton=True, fp8=fp8)
    assert ops.norm.rms_norm is not CUDA_LIKE_OPS.norm.rms_norm
    assert (ops.norm.rms_norm_fp8 is CUDA_LIKE_OPS.norm.rms_norm_fp8) is not fp8
    assert ops.search.beam_step is not CUDA_LIKE_OPS.search.beam_step
    assert ops.search.constrained_topk is CUDA_LIKE_OPS.search.constrained_topk
    assert ops.sampling is CUDA_LIKE_OPS.sampling


def test_building_the_platform_imports_no_triton():
    code = (
        "import sys, torch; from polyrec.hardware.backends.cuda_like import cuda_like_ops;"
        "ops = cuda_like_ops(triton=True, fp8=True);"
        "ops.norm.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6);"  # on the host: the reference
        "sys.exit('triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_choice_is_public():
    assert "cuda_like_ops" in cuda_like.__all__
