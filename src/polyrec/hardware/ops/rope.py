"""Rotary position ops and their meaning: angles, and rotation alone and together with what stands around it in attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import kv
from .draw import Draw
from .norm import rms_norm
from .spec import INFER, TRAIN, Case, Lookup, op, reference_group

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def angles(positions: Tensor, inverse_frequency: Tensor) -> Pair:
    """positions int64 [T], inverse_frequency fp32 [D / 2] -> cosine and sine fp32 [T, D / 2] of their products.

    A product is rounded to fp32 first, as in Hugging Face's models: from another rounding, far positions get other angles.
    """
    angle = positions[:, None].float() * inverse_frequency.float()
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """q [T, H, D], k [T, KV, D], cos and sin [T, D / 2]: halves rotated as in Hugging Face's Llama (Su et al., 2021)."""
    cos, sin = cos.to(q.dtype).unsqueeze(1), sin.to(q.dtype).unsqueeze(1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def qk_norm_rotary(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Pair:
    """RMSNorm over the D of each head of q [T, H, D] and k [T, KV, D] with weights [D], then `rotary` (Qwen3)."""
    return rotary(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), cos, sin)


def parts_of(product: Tensor, dim: int, kv_heads: int) -> Triple:
    """product [T, (H + 2 KV) · D] -> q [T, H, D], k and v [T, KV, D]: views."""
    heads = product.unflatten(-1, (-1, dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    return q, k, v


def qkv_norm_rotary(
    product: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, kv_heads: int
) -> Triple:
    """The QKV product [T, (H + 2 KV) · D] cut into q, k and v; the first two through `qk_norm_rotary`, v a view.

    For training: whoever cuts the product can write its gradient whole, where autograd joins those of three parts.
    """
    q, k, v = parts_of(product, q_weight.shape[0], kv_heads)
    return *qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, eps), v


def rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> Pair:
    """`rotary` of q and k, then `kv.write` of the rotated k and of v [T, KV, D] -> (q, k) rotated."""
    q, k = rotary(q, k, cos, sin)
    kv.write(k, v, key_cache, value_cache, slots)
    return q, k


def qk_norm_rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> Pair:
    """`qk_norm_rotary`, then `kv.write` of k and v: all that stands between the QKV product and attention in Qwen3."""
    q, k = qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, eps)
    kv.write(k, v, key_cache, value_cache, slots)
    return q, k


def _angles_cases(draw: Draw) -> Iterator[Case]:
    for rows, half, theta in ((5, 16, 1e4), (33, 64, 1e6), (1, 5, 1e4))[: 3 if draw.full else 1]:
        positions = draw.integers(0, 1 << 17, rows)
        yield {"positions": positions, "inverse_frequency": theta ** -(torch.arange(half, dtype=draw.dtype) / half)}


def _rotary_cases(draw: Draw) -> Iterator[Case]:
    for rows, heads, kv_heads, dim in ((3, 4, 2, 32), (17, 8, 1, 64), (1, 2, 2, 128))[: 3 if draw.full else 1]:
        angle = draw.uniform(rows, dim // 2, low=-3.0, high=3.0, dtype=torch.float32)
        yield {
            "q": draw.normal(rows, heads, dim),
            "k": draw.normal(rows, kv_heads, dim),
            "cos": angle.cos(),
            "sin": angle.sin(),
        }


def _qk_norm_rotary_cases(draw: Draw) -> Iterator[Case]:
    for case in _rotary_cases(draw):
        dim = case["q"].shape[-1]
        weights = {name: draw.uniform(dim, low=0.5, high=1.5) for name in ("q_weight", "k_weight")}
        yield {**case, **weights, "eps": 1e-6}


def _product_cases(draw: Draw) -> Iterator[Case]:
    for case in _qk_norm_rotary_cases(draw):
        rows, kv_heads, dim = case["k"].shape
        width = case.pop("q").shape[1] + 2 * case.pop("k").shape[1]
        yield {**case, "product": draw.normal(rows, width * dim), "kv_heads": kv_heads}


def _with_caches(cases: Callable[[Draw], Iterator[Case]]) -> Callable[[Draw], Iterator[Case]]:
    def cases_with_caches(draw: Draw) -> Iterator[Case]:
        for case in cases(draw):
            rows, heads, dim = case["k"].shape
            caches = {name: draw.normal(2 * rows + 1, heads, dim) for name in ("key_cache", "value_cache")}
            yield {**case, "v": draw.normal(rows, heads, dim), **caches, "slots": draw.distinct(2 * rows + 1, rows)}

    return cases_with_caches


def _decompose_qk_norm_rotary(op: Lookup) -> Callable[..., Pair]:
    rms_norm, rotary = op("norm.rms_norm"), op("rope.rotary")

    def norm_then_rotate(
        q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
    ) -> Pair:
        return rotary(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), cos, sin)

    return norm_then_rotate


def _decompose_qkv_norm_rotary(op: Lookup) -> Callable[..., Triple]:
    qk_norm_rotary = op("rope.qk_norm_rotary")

    def cut_then_norm_and_rotate(
        product: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, kv_heads: int
    ) -> Triple:
        q, k, v = parts_of(product, q_weight.shape[0], kv_heads)
        return *qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, eps), v

    return cut_then_norm_and_rotate


def _decompose_rotary_store(op: Lookup) -> Callable[..., Pair]:
    rotary, write = op("rope.rotary"), op("kv.write")

    def rotate_then_write(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Pair:
        q, k = rotary(q, k, cos, sin)
        write(k, v, key_cache, value_cache, slots)
        return q, k

    return rotate_then_write


def _decompose_qk_norm_rotary_store(op: Lookup) -> Callable[..., Pair]:
    rms_norm, rotary_store = op("norm.rms_norm"), op("rope.rotary_store")

    def norm_then_rotate_and_write(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Pair:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
        return rotary_store(q, k, v, cos, sin, key_cache, value_cache, slots)

    return norm_then_rotate_and_write


@dataclass(frozen=True)
class RopeOps:
    """Rotation of queries and keys: its angles, the heads' norms before it and the write into the caches after it."""

    angles: Callable[[Tensor, Tensor], Pair] = field(
        metadata=op(
            angles,
            "positions int64 [T], inverse_frequency fp32 [D / 2] -> cos, sin fp32 [T, D / 2]",
            _angles_cases,
            tier="D",
            dtypes=(torch.float32,),
            modes=INFER,
        )
    )
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], Pair] = field(
        metadata=op(
            rotary,
            "q [T, H, D], k [T, KV, D], cos, sin [T, D / 2] -> q, k",
            _rotary_cases,
            tier="R",
            strided=("q", "k"),
            constants=("cos", "sin"),
        )
    )
    qk_norm_rotary: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Pair] = field(
        metadata=op(
            qk_norm_rotary,
            "q [T, H, D], k [T, KV, D], q_weight, k_weight [D], cos, sin [T, D / 2] -> q, k",
            _qk_norm_rotary_cases,
            tier="D",
            needs=("norm.rms_norm", "rope.rotary"),
            decompose=_decompose_qk_norm_rotary,
            strided=("q", "k"),
            constants=("cos", "sin"),
        )
    )
    qkv_norm_rotary: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int], Triple] = field(
        metadata=op(
            qkv_norm_rotary,
            "product [T, (H + 2 KV) · D], q_weight, k_weight [D], cos, sin [T, D / 2] -> q [T, H, D], k, v [T, KV, D]",
            _product_cases,
            tier="D",
            views=("product",),
            modes=TRAIN,
            needs=("rope.qk_norm_rotary",),
            decompose=_decompose_qkv_norm_rotary,
            constants=("cos", "sin"),
        )
    )
    rotary_store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Pair] = field(
        metadata=op(
            rotary_store,
            "q [T, H, D], k, v [T, KV, D], cos, sin [T, D / 2], caches [slots, KV, D], slots int64 [T] -> q, k",
            _with_caches(_rotary_cases),
            tier="D",
            writes=("key_cache", "value_cache"),
            modes=INFER,
            needs=("rope.rotary", "kv.write"),
            decompose=_decompose_rotary_store,
            strided=("q", "k", "v"),
        )
    )
    qk_norm_rotary_store: Callable[..., Pair] = field(
        metadata=op(
            qk_norm_rotary_store,
            "q [T, H, D], k, v [T, KV, D], q_weight, k_weight [D], cos, sin [T, D / 2], caches [slots, KV, D], "
            "slots int64 [T] -> q, k",
            _with_caches(_qk_norm_rotary_cases),
            tier="D",
            writes=("key_cache", "value_cache"),
            modes=INFER,
            needs=("norm.rms_norm", "rope.rotary_store"),
            decompose=_decompose_qk_norm_rotary_store,
            strided=("q", "k", "v"),
        )
    )


REFERENCE_ROPE_OPS = reference_group(RopeOps)
