"""Rotation against transformers' and against complex numbers in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from polyrec.hardware.ops import REFERENCE_OPS


def inputs(tokens, heads, kv_heads, dim, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    # Views into one fused product, as the model makes them.
    fused = torch.randn(tokens, (heads + kv_heads) * dim, generator=generator).to(dtype)
    q, k = (part.unflatten(-1, (-1, dim)) for part in fused.split((heads * dim, kv_heads * dim), dim=-1))
    positions = torch.randint(0, 3000, (tokens,), generator=generator)
    angle = positions[:, None].double() / 10_000 ** (torch.arange(0, dim, 2) / dim)
    return q, k, angle


@pytest.mark.parametrize(("half", "theta"), [(1, 1e4), (8, 1e4), (64, 1e6)])
def test_angles_are_products_rounded_to_fp32(half, theta):
    positions = np.array([0, 1, 17, 4095, 40_959, 131_071])
    frequency = (theta ** -(np.arange(half) / half)).astype(np.float32)
    cos, sin = REFERENCE_OPS.rope.angles(torch.from_numpy(positions), torch.from_numpy(frequency))
    rounded = (positions[:, None] * frequency.astype(np.float64)).astype(np.float32).astype(np.float64)
    assert (cos.dtype, sin.dtype, cos.shape) == (torch.float32, torch.float32, (6, half))
    np.testing.assert_allclose(cos.numpy(), np.cos(rounded), atol=3e-7)
    np.testing.assert_allclose(sin.numpy(), np.sin(rounded), atol=3e-7)


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), [(1, 1, 1, 2), (9, 6, 2, 16), (40, 4, 4, 64)])
def test_rotary_equals_transformers(tokens, heads, kv_heads, dim):
    q, k, angle = inputs(tokens, heads, kv_heads, dim, seed=tokens)
    cos, sin = angle.cos().float(), angle.sin().float()
    found_q, found_k = REFERENCE_OPS.rope.rotary(q, k, cos, sin)
    # Theirs: [batch, heads, tokens, D] and both halves of the angles.
    twice = [torch.cat((part, part), -1)[None] for part in (cos, sin)]
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *twice)
    torch.testing.assert_close(found_q, theirs[0][0].transpose(0, 1), rtol=0, atol=1e-6)
    torch.testing.assert_close(found_k, theirs[1][0].transpose(0, 1), rtol=0, atol=1e-6)


def test_rotary_turns_pairs_as_complex_numbers():
    q, k, angle = inputs(11, 3, 1, 8, seed=1)
    for x, found in zip((q, k), REFERENCE_OPS.rope.rotary(q, k, angle.cos().float(), angle.sin().float()), strict=True):
        first, second = np.split(x.double().numpy(), 2, axis=-1)
        turned = (first + 1j * second) * np.exp(1j * angle.numpy())[:, None]
        expected = np.concatenate([turned.real, turned.imag], -1)
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_rotary_depends_on_the_distance_only():
    q, k, _ = inputs(1, 1, 1, 16, seed=2, dtype=torch.float64)
    frequency = 1 / 10_000 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)

    def product(q_position, k_position):
        turned_q, _ = REFERENCE_OPS.rope.rotary(
            q, k, (q_position * frequency).cos()[None], (q_position * frequency).sin()[None]
        )
        _, turned_k = REFERENCE_OPS.rope.rotary(
            q, k, (k_position * frequency).cos()[None], (k_position * frequency).sin()[None]
        )
        return float((turned_q * turned_k).sum())

    assert product(7, 3) == pytest.approx(product(1004, 1000), abs=1e-9)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_norm_rotary_is_norm_then_rotation(dtype):
    q, k, angle = inputs(13, 4, 2, 32, seed=3, dtype=dtype)
    generator = torch.Generator().manual_seed(4)
    norms = [Qwen3RMSNorm(32, eps=1e-5).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data.copy_(torch.randn(32, generator=generator))
    cos, sin = angle.cos().float(), angle.sin().float()
    found = REFERENCE_OPS.rope.qk_norm_rotary(q, k, norms[0].weight, norms[1].weight, cos, sin, 1e-5)
    twice = [torch.cat((part, part), -1)[None].to(dtype) for part in (cos, sin)]
    theirs = apply_rotary_pos_emb(norms[0](q).transpose(0, 1)[None], norms[1](k).transpose(0, 1)[None], *twice)
    limit = 2e-6 if dtype == torch.float32 else 4e-2
    for our, their in zip(found, theirs, strict=True):
        assert our.dtype == dtype
        torch.testing.assert_close(our, their[0].transpose(0, 1), rtol=limit, atol=limit)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_the_write_into_the_caches(dtype, normed):
    q, k, angle = inputs(5, 4, 2, 16, seed=5, dtype=dtype)
    generator = torch.Generator().manual_seed(6)
    v = torch.randn(5, 2, 16, generator=generator).to(dtype)
    caches = [torch.randn(12, 2, 16, generator=generator).to(dtype) for _ in range(2)]
    slots = torch.tensor([7, 0, 11, 3, 4])
    norms = [Qwen3RMSNorm(16, eps=1e-5).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data.copy_(torch.randn(16, generator=generator))
    cos, sin = angle.cos().float(), angle.sin().float()
    twice = [torch.cat((part, part), -1)[None].to(dtype) for part in (cos, sin)]
    theirs_in = (norms[0](q), norms[1](k)) if normed else (q, k)
    theirs = [x[0].transpose(0, 1) for x in apply_rotary_pos_emb(*(x.transpose(0, 1)[None] for x in theirs_in), *twice)]
    expected = [cache.clone() for cache in caches]
    for row, slot in enumerate(slots.tolist()):
        expected[0][slot], expected[1][slot] = theirs[1][row], v[row]
    rope = REFERENCE_OPS.rope
    if normed:
        weights = [norm.weight.detach() for norm in norms]
        found = rope.qk_norm_rotary_store(q, k, v, *weights, cos, sin, 1e-5, *caches, slots)
    else:
        found = rope.rotary_store(q, k, v, cos, sin, *caches, slots)
    limit = 2e-6 if dtype == torch.float32 else 4e-2
    for our, their in zip((*found, *caches), (*theirs, *expected), strict=True):
        assert our.dtype == dtype
        torch.testing.assert_close(our, their, rtol=limit, atol=limit)
    untouched = [slot for slot in range(12) if slot not in slots.tolist()]
    assert torch.equal(caches[0][untouched], expected[0][untouched])
    assert torch.equal(caches[1], expected[1])
