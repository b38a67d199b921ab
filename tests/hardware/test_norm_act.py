"""Norms and activations against float64 arithmetic written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from e4m3 import decode
from transformers.activations import ACT2FN

from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.hardware.ops.linear import quantize_fp8

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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_and_product(shape, bias):
    x, residual, gain = (random(one, torch.float64, seed) for seed, one in enumerate((shape, shape, shape[-1:])))
    weight, added = random((5, shape[-1]), torch.float64, 3), random((5,), torch.float64, 4) if bias else None
    product, total = REFERENCE_OPS.norm.add_rms_norm_mm(x, residual, gain, 1e-6, weight, added)
    expected = norm64(x + residual, gain, 1e-6) @ weight.numpy().T + (added.numpy() if bias else 0)
    close(product, expected, torch.float64)
    close(total, x.numpy() + residual.numpy(), torch.float64)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_and_product(shape, bias):
    x, half = random(shape, torch.float64, 0), shape[-1] // 2
    weight, added = random((5, half), torch.float64, 1), random((5,), torch.float64, 2) if bias else None
    gate, up = np.split(x.numpy(), 2, -1)
    expected = gate / (1 + np.exp(-gate)) * up @ weight.numpy().T + (added.numpy() if bias else 0)
    close(REFERENCE_OPS.act.silu_and_mul_mm(x, weight, added), expected, torch.float64)


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


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", list(LOOSE))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(shape, bias, dtype, strided):
    x, weight = random(shape, dtype, 10, strided=strided) * 2 + 5, random(shape[-1:], dtype, 11)
    offset = random(shape[-1:], dtype, 12) if bias else None
    wide = x.double().numpy()
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()
    expected = expected + (offset.double().numpy() if bias else 0)
    found = REFERENCE_OPS.norm.layer_norm(x, weight, offset, 1e-5)
    assert found.dtype == dtype
    loose = {torch.float32: 1e-5}.get(dtype, LOOSE[dtype])  # 5 off centre costs three bits
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=loose, atol=loose)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", list(LOOSE))
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_and_mul(shape, dtype, strided):
    x = random((*shape[:-1], 2 * shape[-1]), dtype, 13, strided=strided) * 3
    gate, up = np.split(x.double().numpy(), 2, axis=-1)
    expected = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    found = REFERENCE_OPS.act.gelu_and_mul(x)
    close(found, expected, dtype)
    theirs = ACT2FN["gelu_pytorch_tanh"](x[..., : shape[-1]]) * x[..., shape[-1] :]
    torch.testing.assert_close(found, theirs)


def close_to_quantised(quantized, scale, expected, slack):
    """Half a step of e4m3's mantissa (1/16) or of its smallest numbers (2⁻¹⁰), and what the inputs' dtype rounds."""
    assert (quantized.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert scale.shape == (*expected.shape[:-1], 1)
    largest = np.abs(expected).max(-1, keepdims=True)
    np.testing.assert_allclose(scale.numpy(), largest / 448, rtol=slack)
    found = decode(quantized) * scale.double().numpy()
    assert (np.abs(found - expected) <= (1 / 16 + slack) * np.abs(expected) + largest / 448 / 1024).all()


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("shape", [(1, 4), (7, 64), (3, 5, 32)])
def test_quantised_results(shape, dtype, slack):
    x, residual, weight = random(shape, dtype, 14), random(shape, dtype, 15), random(shape[-1:], dtype, 16)
    close_to_quantised(*REFERENCE_OPS.norm.rms_norm_fp8(x, weight, 1e-6), norm64(x, weight, 1e-6), slack)
    quantized, scale, total = REFERENCE_OPS.norm.add_rms_norm_fp8(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    close_to_quantised(quantized, scale, norm64(total, weight, 1e-6), slack)
    wide = torch.cat((x, residual), -1)
    gate, up = x.double().numpy(), residual.double().numpy()
    close_to_quantised(*REFERENCE_OPS.act.silu_and_mul_fp8(wide), gate / (1 + np.exp(-gate)) * up, slack)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_a_product_before_a_norm_with_quantised_results(dtype, slack, bias):
    q, q_scale = quantize_fp8(random((7, 48), torch.float32, 17))
    wide, wide_scale = quantize_fp8(random((64, 48), torch.float32, 18))
    residual, weight = random((7, 64), dtype, 19), random((64,), dtype, 20)
    offset = random((64,), dtype, 21) if bias else None
    product = (decode(q) * q_scale.double().numpy()) @ (decode(wide) * wide_scale.double().numpy()).T
    expected = product + (offset.double().numpy() if bias else 0) + residual.double().numpy()
    quantized, scale, total = REFERENCE_OPS.norm.mm_add_rms_norm_fp8(
        q, q_scale, wide, wide_scale, offset, residual, weight, 1e-6
    )
    assert total.dtype == dtype
    np.testing.assert_allclose(total.double().numpy(), expected, rtol=slack, atol=slack)
    close_to_quantised(quantized, scale, norm64(total, weight, 1e-6), slack)


def test_gradients_flow():
    x = random((4, 12), torch.float64, 7).requires_grad_()
    weight = random((12,), torch.float64, 8).requires_grad_()
    residual = random((4, 12), torch.float64, 9).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *inputs: REFERENCE_OPS.norm.add_rms_norm(*inputs, 1e-5), (x, residual, weight)
    )
    assert torch.autograd.gradcheck(
        lambda *inputs: REFERENCE_OPS.norm.layer_norm(*inputs, 1e-5), (x, weight, residual[0].detach().requires_grad_())
    )
    assert torch.autograd.gradcheck(REFERENCE_OPS.act.silu_and_mul, (x,))
    assert torch.autograd.gradcheck(REFERENCE_OPS.act.gelu_and_mul, (x,))
