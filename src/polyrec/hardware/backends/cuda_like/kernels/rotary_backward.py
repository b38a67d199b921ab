"""The backward pass of norms of heads and rotation: a program takes every so many-th token, queries and keys at once.

The rotation alone needs no kernel of its own: its gradient is the rotation back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import store

PROGRAMS = 512  # as for RMSNorm


@triton.jit
def _heads(x, gradient, out, weight, cos, sin, half, eps, HEADS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr):
    """Writes the gradient of a token's heads; -> the weight's, its two halves [D / 2]."""
    SIZE: tl.constexpr = 2 * HALF
    head = tl.arange(0, TILE)
    at = (head * SIZE)[:, None] + half[None, :]
    inside = (head < HEADS)[:, None] & (half < HALF)[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    turned = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(gradient + at + HALF, mask=inside, other=0.0).to(tl.float32)
    by_first, by_second = turned * cos + other * sin, other * cos - turned * sin
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    inverse = tl.rsqrt(square / SIZE + eps)[:, None]
    first *= inverse
    second *= inverse
    gain = tl.load(weight + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    pulled = by_first * gain
    gain = tl.load(weight + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    other = by_second * gain
    mean = ((tl.sum(pulled * first, 1) + tl.sum(other * second, 1)) / SIZE)[:, None]
    store(out + at, (pulled - first * mean) * inverse, inside)
    store(out + at + HALF, (other - second * mean) * inverse, inside)
    return tl.sum(by_first * first, 0), tl.sum(by_second * second, 0)


@triton.jit(do_not_specialize=["tokens", "steps"])
def _rotate_backward(
    q,
    k,
    q_gradient,
    k_gradient,
    q_weight,
    k_weight,
    cos,
    sin,
    q_out,
    k_out,
    parts,
    tokens,
    steps,
    q_stride,
    k_stride,
    q_gradient_stride,
    k_gradient_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    SIZE: tl.constexpr = 2 * HALF
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    half = tl.arange(0, HALF_TILE)
    q_first = tl.zeros([HALF_TILE], tl.float32)
    q_second = tl.zeros([HALF_TILE], tl.float32)
    k_first = tl.zeros([HALF_TILE], tl.float32)
    k_second = tl.zeros([HALF_TILE], tl.float32)
    for step in range(steps):
        token = (step * programs + program).to(tl.int64)
        if token < tokens:
            cosine = tl.load(cos + token * HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
            sine = tl.load(sin + token * HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
            from_q = q_gradient + token * q_gradient_stride
            place = q_out + token * (HEADS * SIZE)
            one, two = _heads(
                q + token * q_stride, from_q, place, q_weight, cosine, sine, half, eps, HEADS, HALF, HEADS_TILE
            )
            q_first += one
            q_second += two
            from_k = k_gradient + token * k_gradient_stride
            place = k_out + token * (KV_HEADS * SIZE)
            one, two = _heads(
                k + token * k_stride, from_k, place, k_weight, cosine, sine, half, eps, KV_HEADS, HALF, KV_TILE
            )
            k_first += one
            k_second += two
    parts += program * (2 * SIZE) + half
    tl.store(parts, q_first, mask=half < HALF)
    tl.store(parts + HALF, q_second, mask=half < HALF)
    tl.store(parts + SIZE, k_first, mask=half < HALF)
    tl.store(parts + SIZE + HALF, k_second, mask=half < HALF)


def rotate_backward(
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    gradients: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [T, H, D], k [T, KV, D] and the gradients of both results, each with a token's heads in one piece; weights [D].

    -> gradients of q and k, contiguous, and of the two weights.
    """
    (tokens, heads, size), kv_heads = q.shape, k.shape[1]
    programs = max(min(tokens, PROGRAMS), 1)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    parts = q.new_empty((programs, 2, size), dtype=torch.float32)
    _rotate_backward[(programs,)](
        q,
        k,
        *gradients,
        *weights,
        cos,
        sin,
        q_out,
        k_out,
        parts,
        tokens,
        triton.cdiv(tokens, programs),
        q.stride(0),
        k.stride(0),
        gradients[0].stride(0),
        gradients[1].stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=size // 2,
        HEADS_TILE=triton.next_power_of_2(heads),
        KV_TILE=triton.next_power_of_2(kv_heads),
        HALF_TILE=triton.next_power_of_2(size // 2),
        num_warps=min(max(triton.next_power_of_2(heads) * triton.next_power_of_2(size) // 512, 1), 8),
    )
    by_q, by_k = parts.sum(0)
    return q_out, k_out, by_q.to(weights[0].dtype), by_k.to(weights[1].dtype)
