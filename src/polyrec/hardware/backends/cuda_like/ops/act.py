"""SwiGLU through one Triton kernel, with and without quantised rows, and one for its backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....ops import act as reference
from ....ops.act import ActOps
from ....ops.linear import Fp8Rows
from ....ops.spec import FP8
from .launch import as_rows, kernels, runs_kernel, trains_kernel


def silu_and_mul(x: Tensor) -> Tensor:
    """`ActOps.silu_and_mul`, rounded once."""
    if trains_kernel(x):
        out: Tensor = _SiluAndMul.apply(x)
        return out
    return _activate(x) if runs_kernel(x) else reference.silu_and_mul(x)


def silu_and_mul_mm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`ActOps.silu_and_mul_mm`, which keeps x: the backward kernel makes the activations again beside x's gradient."""
    if not trains_kernel(x, weight):
        return reference.silu_and_mul_mm(x, weight, bias)
    product: Tensor = _SiluAndMulMm.apply(x, weight, bias)
    return product


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _activate(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x_gradient = x.new_empty(x.shape)
        kernels("swiglu_backward").silu_and_mul_backward(
            as_rows(x), as_rows(gradient), x_gradient.view(-1, x.shape[-1]), None
        )
        return x_gradient


class _SiluAndMulMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(_activate(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, by_product = as_rows(x), gradient.reshape(-1, gradient.shape[-1])
        activations = by_product @ weight  # their gradient, whose place they take
        x_gradient = x.new_empty(x.shape)
        kernels("swiglu_backward").silu_and_mul_backward(
            rows, activations, x_gradient.view(-1, x.shape[-1]), activations
        )
        _, weight_needed, bias_needed = ctx.needs_input_grad
        by_weight = by_product.t() @ activations if weight_needed else None
        return x_gradient, by_weight, by_product.sum(0) if bias_needed else None


def _activate(x: Tensor) -> Tensor:
    rows, shape = _rows(x)
    out = x.new_empty(shape)
    kernels("swiglu").silu_and_mul(rows, out.view(-1, shape[-1]), None)
    return out


def silu_and_mul_fp8(x: Tensor) -> Fp8Rows:
    """`ActOps.silu_and_mul_fp8`; the products are not rounded before they are quantised."""
    if not runs_kernel(x):
        return reference.silu_and_mul_fp8(x)
    rows, shape = _rows(x)
    out, scale = x.new_empty(shape, dtype=FP8), x.new_empty((*shape[:-1], 1), dtype=torch.float32)
    kernels("swiglu").silu_and_mul(rows, out.view(-1, shape[-1]), scale)
    return out, scale


def _rows(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """x as [N, 2 I], copied only where it must be, and the result's shape."""
    return as_rows(x), (*x.shape[:-1], x.shape[-1] // 2)


def act_ops(fp8: bool) -> ActOps:
    """fp8: whether the device has e4m3; without it those results are the reference's."""
    ops = replace(reference.REFERENCE_ACT_OPS, silu_and_mul=silu_and_mul, silu_and_mul_mm=silu_and_mul_mm)
    return replace(ops, silu_and_mul_fp8=silu_and_mul_fp8) if fp8 else ops
