"""RMSNorm through one Triton kernel, alone, after the residual's sum and with quantised rows, and one for its backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....ops import norm as reference
from ....ops.linear import Fp8Rows
from ....ops.norm import NormOps
from ....ops.spec import FP8
from .launch import as_rows, kernels, runs_kernel, trains_kernel
from .linear import scaled_mm_by_rows, scaled_mm_parts


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`NormOps.rms_norm`, rounded once."""
    if trains_kernel(x, weight):
        out: Tensor = _RmsNorm.apply(x, weight, eps)
        return out
    return _normed(x, weight, eps) if runs_kernel(x, weight) else reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`NormOps.add_rms_norm`."""
    if trains_kernel(x, residual, weight):
        out, total = _AddRmsNorm.apply(x, residual, weight, eps)
        return out, total
    if not runs_kernel(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    return _added(x, residual, weight, eps)


def add_rms_norm_mm(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`NormOps.add_rms_norm_mm`, which keeps the sum: the backward kernel makes the normed rows again beside its gradient."""
    if not trains_kernel(x, residual, norm_weight, weight):
        return reference.add_rms_norm_mm(x, residual, norm_weight, eps, weight, bias)
    product, total = _AddRmsNormMm.apply(x, residual, norm_weight, eps, weight, bias)
    return product, total


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _normed(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_x, by_weight, _ = _backward(x, weight, ctx.eps, gradient, None, again=False)
        return by_x, by_weight, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, total = _added(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return out, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, by_total: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        by_sum, by_weight, _ = _backward(total, weight, ctx.eps, gradient, by_total, again=False)
        return by_sum, by_sum, by_weight, None


class _AddRmsNormMm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, total = _added(x, residual, norm_weight, eps)
        ctx.save_for_backward(total, norm_weight, weight)
        ctx.eps = eps
        return torch.nn.functional.linear(out, weight, bias), total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, by_total: Tensor) -> tuple[Tensor | None, ...]:
        total, norm_weight, weight = ctx.saved_tensors
        by_product = gradient.reshape(-1, gradient.shape[-1])
        *_, weight_needed, bias_needed = ctx.needs_input_grad
        by_normed = by_product @ weight
        by_sum, by_norm, normed = _backward(total, norm_weight, ctx.eps, by_normed, by_total, again=weight_needed)
        by_weight = None if normed is None else by_product.t() @ normed
        return by_sum, by_sum, by_norm, None, by_weight, by_product.sum(0) if bias_needed else None


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = x.new_empty(x.shape)
    kernels("norm").rms_norm(x, None, weight, eps, out, None, None)
    return out


def _added(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    kernels("norm").rms_norm(x, residual, weight, eps, out, None, total)
    return out, total


def _backward(
    x: Tensor, weight: Tensor, eps: float, by_normed: Tensor, by_total: Tensor | None, *, again: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """-> gradients of x [..., D] and weight [D]; the normed rows [N, D] again."""
    stream = None if by_total is None else as_rows(by_total)
    by_x, by_weight, normed = kernels("norm_backward").rms_norm_backward(
        as_rows(x), weight, eps, as_rows(by_normed), stream, again=again
    )
    return by_x.view(x.shape), by_weight, normed


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """`NormOps.rms_norm_fp8`; the normed values are not rounded before they are quantised."""
    if not runs_kernel(x, weight):
        return reference.rms_norm_fp8(x, weight, eps)
    out, scale = x.new_empty(x.shape, dtype=FP8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    kernels("norm").rms_norm(x, None, weight, eps, out, scale, None)
    return out, scale


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`NormOps.add_rms_norm_fp8`; the sum is rounded, the normed values are not."""
    if not runs_kernel(x, residual, weight):
        return reference.add_rms_norm_fp8(x, residual, weight, eps)
    out, scale = x.new_empty(x.shape, dtype=FP8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    total = x.new_empty(x.shape)
    kernels("norm").rms_norm(x, residual, weight, eps, out, scale, total)
    return out, scale, total


def mm_add_rms_norm_fp8(
    q: Tensor,
    q_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`NormOps.mm_add_rms_norm_fp8`: where the product's inputs are cut, the norm's kernel adds up its parts, to the bits of
    the two operations."""
    product = q, q_scale, weight, weight_scale, bias
    partial = scaled_mm_parts(*product, residual.dtype) if runs_kernel(residual, norm_weight) else None
    if partial is None:
        return add_rms_norm_fp8(scaled_mm_by_rows(*product, residual.dtype), residual, norm_weight, eps)
    out, scale = residual.new_empty(residual.shape, dtype=FP8), q_scale.new_empty(q_scale.shape)
    total = residual.new_empty(residual.shape)
    scales = q_scale, weight_scale, bias
    kernels("norm").rms_norm_of_parts(partial, *scales, residual, norm_weight, eps, out, scale, total)
    return out, scale, total


def norm_ops(fp8: bool) -> NormOps:
    """fp8: whether the device has e4m3; without it those results are the reference's."""
    ops = replace(
        reference.REFERENCE_NORM_OPS, rms_norm=rms_norm, add_rms_norm=add_rms_norm, add_rms_norm_mm=add_rms_norm_mm
    )
    if not fp8:
        return ops
    return replace(
        ops,
        rms_norm_fp8=rms_norm_fp8,
        add_rms_norm_fp8=add_rms_norm_fp8,
        mm_add_rms_norm_fp8=mm_add_rms_norm_fp8,
    )
