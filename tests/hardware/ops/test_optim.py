"""The gradients' norm against float64 arithmetic, not rounded; its kernel's tests, and the sums of columns."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from interpreter import INTERPRETED, ON_DEVICE, passed

from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.testing.conformance import OpsConformance

BODIES = Path(__file__).with_name("optim_bodies.py")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_of_all_numbers(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (300, 17), (1,), (0, 3), (4, 5, 6)
    tensors = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    tensors.append(tensors[0].t()[:, ::3])
    found = REFERENCE_OPS.optim.total_norm(tensors)
    exact = math.sqrt(math.fsum(number * number for one in tensors for number in one.flatten().tolist()))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.shape == ()
    assert abs(found.item() / exact - 1) < (1e-12 if dtype == torch.float64 else 1e-6)


def test_dtypes_may_differ():
    tensors = [torch.full((3,), 2.0, dtype=torch.bfloat16), torch.full((1,), 2.0), torch.full((9,), 1.0).half()]
    found = REFERENCE_OPS.optim.total_norm(tensors)
    assert (found.item(), found.dtype) == (5, torch.float32)


def test_of_nothing_it_is_zero():
    assert REFERENCE_OPS.optim.total_norm([]).item() == 0
    assert REFERENCE_OPS.optim.total_norm([torch.zeros(0), torch.zeros(0, 2)]).item() == 0


class TestOnTheCpu(OpsConformance):
    platform = "cpu"
    fields = ("optim.total_norm",)
    purpose = "train"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is made for Linux only")
def test_in_the_interpreter():
    assert passed(BODIES, INTERPRETED) > 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda")
def test_on_the_device():
    assert passed(BODIES, ON_DEVICE, skips=False) > 80
