"""Norms and activations against float64 arithmetic written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyrec.hardware.ops import REFERENCE_OPS

SHAPES = [(1, 4), (7, 64), (3, 5, 32), (2, 0, 8)]
LOOSE = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}


def norm64(x, weight, eps):
    x = x.double().numpy()
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight.double().numpy()


def close(found, expected, dtype):
    assert found.dtype == dtype
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=LOOSE[dtype], atol=LOOSE[dtype])


def random(shape, dtype, seed, *, strided=False):
    generator = torch.Generator().manual_seed(seed)
    if strided:  # every second column of a wider tensor, rows far apart
        wide = torch.randn(*shape[:-1], 2 * shape[-1] + 3, generator=generator, dtype=torch.float64).to(dtype)
        return wide[..., 1 : 2 * shape[-1] + 1 : 2]
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", list(LOOSE))
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype, strided):
    x, weight = random(shape, dtype, 0, strided=strided), random(shape[-1:], dtype, 1)
    before = x.clone()
    close(REFERENCE_OPS.norm.rms_norm(x, weight, 1e-5), norm64(x, weight, 1e-5), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_rms_norm_keeps_its_epsilon_and_its_range(scale):
    x, weight = random((5, 16), torch.float32, 2) * scale, torch.ones(16)
    close(REFERENCE_OPS.norm.rms_norm(x, weight, 1e-6), norm64(x, weight, 1e-6), torch.float32)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape, dtype, strided):
    x, residual = random(shape, dtype, 3, strided=strided), random(shape, dtype, 4, strided=strided)
    weight = random(shape[-1:], dtype, 5)
    kept = x.clone(), residual.clone()
    normed, total = REFERENCE_OPS.norm.add_rms_norm(x, residual, weight, 1e-6)
    close(total, x.double().numpy() + residual.double().numpy(), dtype)
    close(normed, norm64(x.double() + residual.double(), weight, 1e-6), dtype)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", list(LOOSE))
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_and_mul(shape, dtype, strided):
    x = random((*shape[:-1], 2 * shape[-1]), dtype, 6, strided=strided) * 3
    gate, up = np.split(x.double().numpy(), 2, axis=-1)
    close(REFERENCE_OPS.act.silu_and_mul(x), gate / (1 + np.exp(-gate)) * up, dtype)


def test_gradients_flow():
    x = random((4, 12), torch.float64, 7).requires_grad_()
    weight = random((12,), torch.float64, 8).requires_grad_()
    residual = random((4, 12), torch.float64, 9).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *inputs: REFERENCE_OPS.norm.add_rms_norm(*inputs, 1e-5), (x, residual, weight)
    )
    assert torch.autograd.gradcheck(REFERENCE_OPS.act.silu_and_mul, (x,))
