"""Quantised layers against arithmetic in float64 on decoded e4m3 numbers, and which operations each choice calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from e4m3 import decode

from polyrec.attention.layout import packed_layout
from polyrec.attention.sdpa import PackedPlan
from polyrec.core.errors import CheckpointError
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.hardware.ops.linear import quantize_fp8
from polyrec.kvcache.pool import KVPool
from polyrec.layers.attention import Attention
from polyrec.layers.choices import LayerChoices
from polyrec.layers.linear import Fp8BlockLinear, Fp8Linear, Linear, PendingProduct, QuantizedRows, make_linear
from polyrec.layers.mlp import GatedMLP
from polyrec.layers.norm import RMSNorm
from polyrec.layers.rotary import RotaryAngles

FP8 = LayerChoices(weights="fp8")


def filled(module, seed=0):
    """Random e4m3 numbers of every size for quantised weights, spread scales, normal numbers for the rest."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if name.endswith("weight_scale"):
            parameter.data.uniform_(0.001, 0.01, generator=generator)
        elif parameter.dtype == torch.float8_e4m3fn:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 40)
        else:
            parameter.data.normal_(generator=generator)
    return module


def wide(linear, block=None):
    """The weight that a quantised layer stands for, float64 [out, in]."""
    scale = linear.weight_scale.double().numpy()
    if block:
        scale = scale.repeat(block, 0).repeat(block, 1)[: linear.weight.shape[0], : linear.weight.shape[1]]
    return decode(linear.weight.data) * scale


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_quantised_rows(bias, dtype):
    linear = filled(Fp8Linear(48, (32, 16), bias=bias, ops=REFERENCE_OPS.linear, dtype=dtype))
    rows = QuantizedRows(*quantize_fp8(torch.randn(5, 48)))
    expected = (decode(rows.values) * rows.scale.double().numpy()) @ wide(linear).T
    if bias:
        expected += linear.bias.double().numpy()
    found = linear(rows)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found.double().numpy(), expected, rtol=1e-5 if dtype == torch.float32 else 5e-3, atol=1e-4
    )
    assert not any(parameter.requires_grad for parameter in linear.parameters())


def test_plain_rows_are_quantised_by_the_layer():
    linear = filled(Fp8Linear(48, (32,), bias=False, ops=REFERENCE_OPS.linear, dtype=torch.float32))
    x = torch.randn(5, 48)
    assert torch.equal(linear(x), linear(QuantizedRows(*quantize_fp8(x))))
    error = np.linalg.norm(linear(x).numpy() - x.double().numpy() @ wide(linear).T) / np.linalg.norm(linear(x).numpy())
    assert 1e-4 < error < 0.04  # three mantissa bits


@pytest.mark.parametrize("parts", [(200,), (128, 256, 72)])
def test_a_product_with_scales_of_blocks(parts):
    linear = filled(Fp8BlockLinear(256, parts, bias=True, ops=REFERENCE_OPS.linear, dtype=torch.float32))
    assert linear.weight_scale.shape == (sum(linear.scale_parts), 2)
    x = torch.randn(3, 256)
    x[:, 128:] *= 100  # one scale for a row would lose the first half
    expected = x.double().numpy() @ wide(linear, 128).T + linear.bias.double().numpy()
    error = linear(x).numpy() - expected
    assert np.linalg.norm(error) < 0.04 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("weights", "inputs", "parts"), [("fp8", 24, (32,)), ("fp8", 32, (16, 8)), ("fp8_blocks", 128, (64, 128))]
)
def test_sizes_that_products_do_not_take_are_refused(weights, inputs, parts):
    with pytest.raises(CheckpointError) as caught:
        make_linear(inputs, parts, bias=False, ops=REFERENCE_OPS.linear, choices=LayerChoices(weights=weights))
    assert caught.value.code == "quantization_sizes"


def test_the_form_is_chosen_when_the_layer_is_built():
    kinds = {"plain": Linear, "fp8": Fp8Linear, "fp8_blocks": Fp8BlockLinear}
    for weights, kind in kinds.items():
        choices = LayerChoices(dtype=torch.bfloat16, weights=weights)
        made = make_linear(128, (128,), bias=True, ops=REFERENCE_OPS.linear, choices=choices)
        assert type(made) is kind
        assert made.bias.dtype == torch.bfloat16


@torch.inference_mode()
def test_a_norm_that_quantises_its_result():
    norm = filled(RMSNorm(64, 1e-6, REFERENCE_OPS.norm, quantized=True))
    plain = RMSNorm(64, 1e-6, REFERENCE_OPS.norm)
    plain.load_state_dict(norm.state_dict())
    x, residual = torch.randn(4, 64), torch.randn(4, 64)
    for before in (None, residual):
        (values, scale), total = norm(x, before)
        expected, expected_total = plain(x, before)
        assert torch.equal(total, expected_total)
        found = decode(values) * scale.double().numpy()
        # Half a step of e4m3 beside the number, or of its smallest steps.
        assert (np.abs(found - expected.double().numpy()) <= np.abs(found) / 15 + scale.numpy() * 2**-10).all()


def counting(ops, calls):
    """The operations, each counting its calls under its name."""

    def counted(name, function):
        def call(*args):
            calls[name] += 1
            return function(*args)

        return call

    groups = {}
    for group in fields(ops):
        functions = getattr(ops, group.name)
        own = {f.name: counted(f"{group.name}.{f.name}", getattr(functions, f.name)) for f in fields(functions)}
        groups[group.name] = replace(functions, **own)
    return replace(ops, **groups)


def through_a_block(choices, ops=REFERENCE_OPS, tokens=6):
    """Norm, attention with a cache, norm, feed-forward, and the norm at a model's end -> (the stream, the normed rows, keys,
    values), of the same weights for all `choices`."""
    torch.manual_seed(1)
    quantized = choices.norms_quantize, choices.norms_quantize, False
    norms = [RMSNorm(64, 1e-6, ops.norm, quantized=own, dtype=choices.dtype) for own in quantized]
    attention = Attention(0, 64, 4, 2, 16, eps=1e-6, bias=False, ops=ops, choices=choices)
    mlp = GatedMLP(64, 96, ops=ops, choices=choices)
    for seed, module in enumerate((*norms, attention, mlp)):
        filled(module, seed)
    x = torch.randn(tokens, 64).to(choices.dtype)
    pool = KVPool(1, tokens, 2, 16, choices.dtype, x.device)
    plan = PackedPlan(packed_layout(torch.tensor([tokens])), pool, ops.kv)
    with torch.inference_mode():
        normed, residual = norms[0](x, None)
        hidden = attention(normed, RotaryAngles(16, 1e4)(torch.arange(tokens)), plan)
        normed, residual = norms[1](hidden, residual)
        normed, total = norms[2](mlp(normed), residual)
        return total, normed, pool.keys, pool.values


OFF = {"fused_rms_fp8": 3, "fused_silu_fp8": 2, "fused_qk_rope_kv": 1}


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_fused_operation_the_result_is_the_same(off, dtype):
    fused = through_a_block(replace(FP8, dtype=dtype))
    apart = through_a_block(replace(FP8, dtype=dtype, **{off: False}))
    for found, expected in zip(apart, fused, strict=True):
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert error <= (1e-5 if dtype == torch.float32 else 0.025)


@pytest.mark.parametrize("off", [None, *OFF])
def test_who_quantises(off):
    """Fused: only attention's own result is quantised apart. Each norm and SwiGLU that does not do it adds one call."""
    calls = Counter()
    through_a_block(replace(FP8, **({off: False} if off else {})), counting(REFERENCE_OPS, calls))
    assert calls["linear.scaled_mm"] + calls["norm.mm_add_rms_norm_fp8"] == 4
    assert calls["linear.mm"] == 0
    assert calls["linear.quantize_fp8"] == {None: 1, **OFF}[off]
    assert calls["norm.rms_norm_fp8"] + calls["norm.mm_add_rms_norm_fp8"] == (0 if off == "fused_rms_fp8" else 2)
    assert calls["norm.add_rms_norm_fp8"] == 0
    assert calls["act.silu_and_mul_fp8"] == (0 if off == "fused_silu_fp8" else 1)


@pytest.mark.parametrize("off", [{}, {"fused_silu_fp8": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_computes_the_product_before_a_norm(dtype, off):
    """The norm, in one operation, or the block and then the norm, in two: to the same bits. What no norm that quantises follows
    is computed apart."""
    choices, calls = replace(FP8, dtype=dtype, **off), (Counter(), Counter())
    pending = through_a_block(choices, counting(REFERENCE_OPS, calls[0]))
    apart = through_a_block(replace(choices, fused_mm_rms_fp8=False), counting(REFERENCE_OPS, calls[1]))
    assert all(torch.equal(one, other) for one, other in zip(pending, apart, strict=True))
    assert [own["norm.mm_add_rms_norm_fp8"] for own in calls] == [1, 0]
    assert [own["norm.add_rms_norm_fp8"] for own in calls] == [0, 1]
    assert [own["linear.scaled_mm"] for own in calls] == [3, 4]
    assert [own["norm.add_rms_norm"] for own in calls] == [1, 1]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_every_norm_takes_a_product_that_is_not_computed_yet(bias, quantized):
    ops = REFERENCE_OPS
    plain, pending = (
        filled(Fp8Linear(48, (64,), bias=bias, ops=ops.linear, dtype=torch.bfloat16, pending=own))
        for own in (False, True)
    )
    norm = filled(RMSNorm(64, 1e-6, ops.norm, quantized=quantized, dtype=torch.bfloat16))
    x, residual = torch.randn(5, 48).bfloat16(), torch.randn(5, 64).bfloat16()
    product = pending(x)
    assert isinstance(product, PendingProduct)
    assert torch.equal(product.computed(), plain(x))
    for rows in (x, QuantizedRows(*ops.linear.quantize_fp8(x))):
        (found, total), (expected, expected_total) = norm(pending(rows), residual), norm(plain(rows), residual)
        assert torch.equal(total, expected_total)
        pairs = zip(found, expected, strict=True) if quantized else [(found, expected)]
        assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def test_a_product_is_left_only_to_norms_that_quantise():
    def made(before_norm=True, **choices):
        return make_linear(
            128, (128,), bias=False, ops=REFERENCE_OPS.linear, choices=LayerChoices(**choices), before_norm=before_norm
        )

    x = torch.randn(2, 128)
    assert isinstance(filled(made(weights="fp8"))(x), PendingProduct)
    for linear in (
        made(weights="fp8", before_norm=False),
        made(weights="fp8", fused_rms_fp8=False),
        made(weights="fp8", fused_mm_rms_fp8=False),
        made(weights="fp8_blocks"),
        made(),
    ):
        assert isinstance(filled(linear)(x), torch.Tensor)


@pytest.mark.parametrize("fused", [True, False])
def test_keys_and_values_are_written_once(fused):
    """One write a token and layer: inside the operation that rotates, or in the one that it decomposes into."""
    calls = Counter()
    through_a_block(LayerChoices(fused_qk_rope_kv=fused), counting(REFERENCE_OPS, calls))
    assert calls["kv.write"] == 0  # the plan is told that they are written
    assert calls["rope.qk_norm_rotary_store"] == int(fused)
    assert calls["rope.rotary_store"] == int(not fused)
    assert calls["norm.rms_norm"] == (1 if fused else 3)


def test_without_a_cache_nothing_is_stored_and_the_result_is_the_same():
    for fused in (True, False):
        torch.manual_seed(2)
        attention = filled(
            Attention(
                0, 64, 4, 2, 16, eps=1e-6, bias=True, ops=REFERENCE_OPS, choices=LayerChoices(fused_qk_rope_kv=fused)
            )
        )
        layout, angles, x = (
            packed_layout(torch.tensor([4, 2])),
            RotaryAngles(16, 1e4)(torch.arange(6)),
            torch.randn(6, 64),
        )
        pool = KVPool(1, 6, 2, 16, torch.float32, x.device)
        kept = attention(x, angles, PackedPlan(layout, pool, REFERENCE_OPS.kv))
        torch.testing.assert_close(attention(x, angles, PackedPlan(layout)), kept)
