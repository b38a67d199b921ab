"""What stands between the QKV product and attention, a token a program: norms of the heads, rotation, the write of k and v.

q, k and v may be views of the product's rows; a head's values and a token's heads follow each other.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import store
from .early import early, let_next_begin, wait_for_earlier


class Store(NamedTuple):
    """v [T, KV, D] to write with k, into caches [slots, KV, D], at slots int64 [T]."""

    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor


@triton.jit
def _load(x, weight, at, half, inside, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves of a token's heads [heads, D / 2], and with NORM those of the norm's weight [1, D / 2]."""
    loaded = (tl.load(x + at, mask=inside, other=0.0), tl.load(x + at + HALF, mask=inside, other=0.0))
    if NORM:
        low = tl.load(weight + half, mask=half < HALF, other=0.0)[None, :]
        high = tl.load(weight + HALF + half, mask=half < HALF, other=0.0)[None, :]
        loaded = loaded + (low, high)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@triton.jit
def _rotated(loaded, cos, sin, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """What `_load` gave -> both halves, normalised and rotated, fp32."""
    first, second = loaded[0].to(tl.float32), loaded[1].to(tl.float32)
    if NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        inverse = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        first *= inverse * loaded[2].to(tl.float32)
        second *= inverse * loaded[3].to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rotate(
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    q_out,
    k_out,
    key_cache,
    value_cache,
    slots,
    q_stride,
    k_stride,
    v_stride,
    key_stride,
    value_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_earlier(EARLY)
    SIZE: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_TILE)
    head = tl.arange(0, HEADS_TILE)
    at = (head * SIZE)[:, None] + half[None, :]
    inside = (head < HEADS)[:, None] & (half < HALF)[None, :]
    kv_head = tl.arange(0, KV_TILE)
    kv_at = (kv_head * SIZE)[:, None] + half[None, :]
    kv_inside = (kv_head < KV_HEADS)[:, None] & (half < HALF)[None, :]
    # A program does little, so what it costs is trips to memory one after another: all loads are under way before the first
    # store, which the compiler moves none across.
    cosine = tl.load(cos + token * HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    query = _load(q + token * q_stride, q_weight, at, half, inside, HALF, NORM)
    key = _load(k + token * k_stride, k_weight, kv_at, half, kv_inside, HALF, NORM)
    if STORE:
        slot = tl.load(slots + token).to(tl.int64)
        value = _load(v + token * v_stride, v, kv_at, half, kv_inside, HALF, False)

    first, second = _rotated(query, cosine, sine, eps, HALF, NORM)
    let_next_begin(EARLY)
    place = q_out + token * (HEADS * SIZE) + at
    store(place, first, inside)
    store(place + HALF, second, inside)

    first, second = _rotated(key, cosine, sine, eps, HALF, NORM)
    place = k_out + token * (KV_HEADS * SIZE) + kv_at
    store(place, first, kv_inside)
    store(place + HALF, second, kv_inside)
    if STORE:
        place = key_cache + slot * key_stride + kv_at
        store(place, first, kv_inside)
        store(place + HALF, second, kv_inside)
        place = value_cache + slot * value_stride + kv_at
        store(place, value[0].to(tl.float32), kv_inside)
        store(place + HALF, value[1].to(tl.float32), kv_inside)


def rotate(
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    q_out: Tensor,
    k_out: Tensor,
    kept: Store | None,
) -> None:
    """Fills q_out [T, H, D] and k_out [T, KV, D]. weights: of the heads' norms [D]. cos, sin: [T, D / 2]."""
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    q_weight, k_weight = weights or (cos, cos)
    v, key_cache, value_cache, slots = kept or (k, k, k, cos)
    _rotate[(tokens,)](
        q,
        k,
        v,
        q_weight,
        k_weight,
        cos,
        sin,
        q_out,
        k_out,
        key_cache,
        value_cache,
        slots,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=size // 2,
        HEADS_TILE=triton.next_power_of_2(heads),
        KV_TILE=triton.next_power_of_2(kv_heads),
        HALF_TILE=triton.next_power_of_2(size // 2),
        NORM=weights is not None,
        STORE=kept is not None,
        **early(),
        num_warps=min(max(triton.next_power_of_2(heads) * triton.next_power_of_2(size) // 512, 1), 8),
    )
