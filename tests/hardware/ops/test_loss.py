"""The weighted loss against float64 arithmetic; blocks of rows cut it where their size says."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreter import INTERPRETED, ON_DEVICE, passed

from polyrec.hardware.backends.cuda_like.ops.loss import BLOCK_BYTES, block_rows
from polyrec.hardware.ops import REFERENCE_OPS

BODIES = Path(__file__).with_name("loss_bodies.py")


def test_weighted_cross_entropy_and_its_gradients():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 4, generator=generator).requires_grad_() for rows in (5, 7))
    targets, scale = torch.tensor([0, 6, 3, 3, 1]), torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25])
    total, losses = REFERENCE_OPS.loss.weighted_cross_entropy(hidden, weight, targets, scale)
    (3 * total).backward()
    h, w, s = (part.detach().double().numpy() for part in (hidden, weight, scale))
    normalizer = np.logaddexp.reduce(h @ w.T, axis=1)
    expected = normalizer - (h @ w.T)[np.arange(5), targets]
    np.testing.assert_allclose(losses.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(total.item(), expected @ s, rtol=1e-5)
    assert not losses.requires_grad
    share = 3 * s[:, None] * (np.exp(h @ w.T - normalizer[:, None]) - np.eye(7)[targets])
    np.testing.assert_allclose(hidden.grad.numpy(), share @ w, atol=1e-5)
    np.testing.assert_allclose(weight.grad.numpy(), share.T @ h, atol=1e-5)


@pytest.mark.parametrize("classes", [1, 3, 64, 8192, 176_256, 3_000_000, 1 << 40])
def test_a_block_of_logits_fills_its_memory(classes):
    rows = block_rows(classes, 2)
    assert rows == 1 or rows * classes * 2 <= BLOCK_BYTES < 2 * rows * classes * 2
    assert rows & (rows - 1) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is made for Linux only")
def test_blocks_in_the_interpreter():
    assert passed(BODIES, INTERPRETED) > 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda")
def test_blocks_on_the_device():
    assert passed(BODIES, ON_DEVICE, skips=False) > 14
