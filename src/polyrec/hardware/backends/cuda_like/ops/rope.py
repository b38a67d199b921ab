"""Rotation through one Triton kernel, with and without the heads' norms before it and the write into the caches after it; one
for the backward pass of norms and rotation; and one for the angles.

Caches may have another dtype than k and v: e4m3 pages get the values themselves (their scale is 1), saturated at ±448.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....ops import rope as reference
from ....ops.rope import Pair, RopeOps, Triple, parts_of
from .launch import kernels, runs_kernel, trains_kernel


def angles(positions: Tensor, inverse_frequency: Tensor) -> Pair:
    """`RopeOps.angles`."""
    if not runs_kernel(inverse_frequency, positions):
        return reference.angles(positions, inverse_frequency)
    cos = torch.empty((len(positions), len(inverse_frequency)), dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    kernels("angles").angles(positions.contiguous(), inverse_frequency, cos, sin)
    return cos, sin


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """`RopeOps.rotary`."""
    if trains_kernel(q, k):
        turned: Pair = _Rotary.apply(q, k, cos, sin)
        return turned
    if not runs_kernel(q, k):
        return reference.rotary(q, k, cos, sin)
    return _rotate(q, k, None, cos, sin, 0.0)


def qk_norm_rotary(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Pair:
    """`RopeOps.qk_norm_rotary`."""
    if trains_kernel(q, k, q_weight, k_weight):
        turned: Pair = _QkNormRotary.apply(q, k, q_weight, k_weight, cos, sin, eps)
        return turned
    if not runs_kernel(q, k, q_weight, k_weight):
        return reference.qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, eps)
    return _rotate(q, k, (q_weight, k_weight), cos, sin, eps)


def qkv_norm_rotary(
    product: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, kv_heads: int
) -> Triple:
    """`RopeOps.qkv_norm_rotary`; one backward kernel writes all of the product's gradient."""
    if not trains_kernel(product, q_weight, k_weight):
        q, k, v = parts_of(product, q_weight.shape[0], kv_heads)
        return *qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, eps), v
    found: Triple = _QkvNormRotary.apply(product, q_weight, k_weight, cos, sin, eps, kv_heads)
    return found


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
    """`RopeOps.rotary_store`."""
    if not runs_kernel(q, k, v):
        return reference.rotary_store(q, k, v, cos, sin, key_cache, value_cache, slots)
    return _rotate(q, k, None, cos, sin, 0.0, (heads_together(v), key_cache, value_cache, slots))


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
    """`RopeOps.qk_norm_rotary_store`."""
    if not runs_kernel(q, k, v, q_weight, k_weight):
        return reference.qk_norm_rotary_store(q, k, v, q_weight, k_weight, cos, sin, eps, key_cache, value_cache, slots)
    kept = heads_together(v), key_cache, value_cache, slots
    return _rotate(q, k, (q_weight, k_weight), cos, sin, eps, kept)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, None, cos, sin, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_q: Tensor, by_k: Tensor) -> tuple[Tensor | None, ...]:
        """The rotation back."""
        cos, sin = ctx.saved_tensors
        return *_rotate(by_q, by_k, None, cos, -sin, 0.0), None, None


class _QkNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
    ) -> Pair:
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.eps = eps
        return _rotate(q, k, (q_weight, k_weight), cos, sin, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_q: Tensor, by_k: Tensor) -> tuple[Tensor | None, ...]:
        q, k, *constants = ctx.saved_tensors
        outs = q.new_empty(q.shape), k.new_empty(k.shape)
        return *outs, *_rotate_back(q, k, constants, ctx.eps, (by_q, by_k), outs), None, None, None


class _QkvNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        product: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        kv_heads: int,
    ) -> Triple:
        ctx.save_for_backward(product, q_weight, k_weight, cos, sin)
        ctx.eps, ctx.kv_heads = eps, kv_heads
        q, k, v = parts_of(product, q_weight.shape[0], kv_heads)
        return *_rotate(q, k, (q_weight, k_weight), cos, sin, eps), v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        product, *constants = ctx.saved_tensors
        by_product = product.new_empty(product.shape)
        (q, k, _), outs = (parts_of(whole, constants[0].shape[0], ctx.kv_heads) for whole in (product, by_product))
        by_weights = _rotate_back(q, k, constants, ctx.eps, gradients, outs)
        return by_product, *by_weights, None, None, None, None


def _rotate(
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    kept: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Pair:
    q, k = heads_together(q), heads_together(k)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    kernels("rotary").rotate(q, k, weights, cos, sin, eps, q_out, k_out, kept)
    return q_out, k_out


def _rotate_back(
    q: Tensor,
    k: Tensor,
    constants: Sequence[Tensor],
    eps: float,
    gradients: tuple[Tensor, ...],
    outs: tuple[Tensor, ...],
) -> Pair:
    """constants: both weights, cos and sin. Fills outs from the results' gradients -> the gradients of both weights."""
    q_weight, k_weight, cos, sin = constants
    gradients = tuple(heads_together(gradient) for gradient in gradients)
    found: Pair = kernels("rotary_backward").rotate_backward(
        heads_together(q), heads_together(k), (q_weight, k_weight), cos, sin, eps, gradients, outs
    )
    return found


def heads_together(x: Tensor) -> Tensor:
    """x [T, H, D] with each token's heads in one piece, as in every part of a fused product; others are copied."""
    _, along_heads, along_head = x.stride()
    return x if along_head == 1 and along_heads == x.shape[2] else x.contiguous()


def rope_ops() -> RopeOps:
    """All fields."""
    return replace(
        reference.REFERENCE_ROPE_OPS,
        angles=angles,
        rotary=rotary,
        qk_norm_rotary=qk_norm_rotary,
        qkv_norm_rotary=qkv_norm_rotary,
        rotary_store=rotary_store,
        qk_norm_rotary_store=qk_norm_rotary_store,
    )
