"""The backward pass of norms of heads and rotation: a program takes every so many-th token, queries and keys at once.

The rotation alone needs no kernel of its own: its gradient is the rotation back. While a program works on a token, the next
ones' values are on their way; and no sum in the loop is of more than a head, since the weights' terms meet behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import store
from .rows import stages

PROGRAMS = 1024  # as for RMSNorm: 114 us for 16,384 tokens of the 1.7B model on an H200, where 512 take 128
STAGES = 3  # one less than the tokens whose values a program has or waits for; 1: it asks for no token before its turn


@triton.jit
def _halves(x, at, inside, HALF: tl.constexpr):
    """Both halves of a token's heads, as they are stored."""
    return tl.load(x + at, mask=inside, other=0.0), tl.load(x + at + HALF, mask=inside, other=0.0)


@triton.jit
def _gains(weight, half, HALF: tl.constexpr):
    """Both halves of a norm's weight, fp32 [1, D / 2]."""
    first = tl.load(weight + half, mask=half < HALF, other=0.0).to(tl.float32)
    second = tl.load(weight + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)
    return first[None, :], second[None, :]


@triton.jit
def _heads(first, second, turned, other, gain_first, gain_second, cos, sin, eps, SIZE: tl.constexpr):
    """Halves of heads, and of what their results got -> halves of the heads' gradient, and the weight's terms."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    turned, other = turned.to(tl.float32), other.to(tl.float32)
    by_first, by_second = turned * cos + other * sin, other * cos - turned * sin
    along_first, along_second = by_first * first, by_second * second
    # Neither sum waits for the other: what the norm divides by comes in behind both.
    square = tl.sum(first * first + second * second, 1) / SIZE
    pull = tl.sum(along_first * gain_first + along_second * gain_second, 1) / SIZE
    inverse = tl.rsqrt(square + eps)
    slope = (pull * inverse * inverse)[:, None]
    inverse = inverse[:, None]
    out_first = (by_first * gain_first - first * slope) * inverse
    out_second = (by_second * gain_second - second * slope) * inverse
    return out_first, out_second, along_first * inverse, along_second * inverse


@triton.jit(do_not_specialize=["tokens", "steps"])
def _rotate_backward(
    q,
    k,
    q_gradient,
    k_gradient,
    v_gradient,
    q_weight,
    k_weight,
    cos,
    sin,
    q_out,
    k_out,
    v_out,
    parts,
    tokens,
    steps,
    q_stride,
    k_stride,
    q_gradient_stride,
    k_gradient_stride,
    v_gradient_stride,
    q_out_stride,
    k_out_stride,
    v_out_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    VALUE: tl.constexpr,
    STAGES: tl.constexpr,
):
    SIZE: tl.constexpr = 2 * HALF
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    half = tl.arange(0, HALF_TILE)
    q_head = tl.arange(0, HEADS_TILE)
    k_head = tl.arange(0, KV_TILE)
    q_at = (q_head * SIZE)[:, None] + half[None, :]
    k_at = (k_head * SIZE)[:, None] + half[None, :]
    q_gain, q_gain_second = _gains(q_weight, half, HALF)
    k_gain, k_gain_second = _gains(k_weight, half, HALF)
    q_first = tl.zeros([HEADS_TILE, HALF_TILE], tl.float32)
    q_second = tl.zeros([HEADS_TILE, HALF_TILE], tl.float32)
    k_first = tl.zeros([KV_TILE, HALF_TILE], tl.float32)
    k_second = tl.zeros([KV_TILE, HALF_TILE], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        token = (step * programs + program).to(tl.int64)
        inside = half < tl.where(token < tokens, HALF, 0)
        q_inside = (q_head < HEADS)[:, None] & inside[None, :]
        k_inside = (k_head < KV_HEADS)[:, None] & inside[None, :]
        # All loads before the first store, behind which none may be moved.
        cosine = tl.load(cos + token * HALF + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        sine = tl.load(sin + token * HALF + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        of_q, of_q_second = _halves(q + token * q_stride, q_at, q_inside, HALF)
        by_q, by_q_second = _halves(q_gradient + token * q_gradient_stride, q_at, q_inside, HALF)
        of_k, of_k_second = _halves(k + token * k_stride, k_at, k_inside, HALF)
        by_k, by_k_second = _halves(k_gradient + token * k_gradient_stride, k_at, k_inside, HALF)
        if VALUE:
            by_v, by_v_second = _halves(v_gradient + token * v_gradient_stride, k_at, k_inside, HALF)

        first, second, one, two = _heads(
            of_q, of_q_second, by_q, by_q_second, q_gain, q_gain_second, cosine, sine, eps, SIZE
        )
        q_first += one
        q_second += two
        place = q_out + token * q_out_stride + q_at
        store(place, first, q_inside)
        store(place + HALF, second, q_inside)

        first, second, one, two = _heads(
            of_k, of_k_second, by_k, by_k_second, k_gain, k_gain_second, cosine, sine, eps, SIZE
        )
        k_first += one
        k_second += two
        place = k_out + token * k_out_stride + k_at
        store(place, first, k_inside)
        store(place + HALF, second, k_inside)

        if VALUE:
            place = v_out + token * v_out_stride + k_at
            tl.store(place, by_v, mask=k_inside)
            tl.store(place + HALF, by_v_second, mask=k_inside)
    parts += program * (2 * SIZE) + half
    tl.store(parts, tl.sum(q_first, 0), mask=half < HALF)
    tl.store(parts + HALF, tl.sum(q_second, 0), mask=half < HALF)
    tl.store(parts + SIZE, tl.sum(k_first, 0), mask=half < HALF)
    tl.store(parts + SIZE + HALF, tl.sum(k_second, 0), mask=half < HALF)


def rotate_backward(
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    gradients: tuple[Tensor, ...],
    outs: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor]:
    """Fills outs, of q [T, H, D] and k [T, KV, D], from the gradients of both results; -> the gradients of both weights [D].

    A third gradient, of v [T, KV, D], is copied to a third out. Everything has each token's heads in one piece.
    """
    (tokens, heads, size), kv_heads = q.shape, k.shape[1]
    programs = max(min(tokens, PROGRAMS), 1)
    parts = q.new_empty((programs, 2, size), dtype=torch.float32)
    value = len(gradients) == 3
    by_q, by_k, by_v = gradients if value else (*gradients, gradients[1])
    q_out, k_out, v_out = outs if value else (*outs, outs[1])
    heads_tile, kv_tile, half_tile = (triton.next_power_of_2(count) for count in (heads, kv_heads, size // 2))
    step_bytes = (2 * heads_tile + (2 + value) * kv_tile) * 2 * half_tile * q.element_size()
    _rotate_backward[(programs,)](
        q,
        k,
        by_q,
        by_k,
        by_v,
        *weights,
        cos,
        sin,
        q_out,
        k_out,
        v_out,
        parts,
        tokens,
        triton.cdiv(tokens, programs),
        q.stride(0),
        k.stride(0),
        by_q.stride(0),
        by_k.stride(0),
        by_v.stride(0),
        q_out.stride(0),
        k_out.stride(0),
        v_out.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=size // 2,
        HEADS_TILE=heads_tile,
        KV_TILE=kv_tile,
        HALF_TILE=half_tile,
        VALUE=value,
        STAGES=stages(STAGES, step_bytes),
        num_warps=min(max(heads_tile * 2 * half_tile // 512, 1), 8),
    )
    by_q_weight, by_k_weight = parts.sum(0)
    return by_q_weight.to(weights[0].dtype), by_k_weight.to(weights[1].dtype)
