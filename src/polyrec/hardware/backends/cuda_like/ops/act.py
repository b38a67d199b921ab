"""SwiGLU through one Triton kernel, with and without quantised rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....ops import act as reference
from ....ops.act import ActOps
from ....ops.linear import Fp8Rows
from ....ops.spec import FP8
from .launch import kernels, runs_kernel


def silu_and_mul(x: Tensor) -> Tensor:
    """`ActOps.silu_and_mul`, rounded once."""
    if not runs_kernel(x):
        return reference.silu_and_mul(x)
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
    size = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, size)
    return rows if rows.stride(1) == 1 else rows.contiguous(), (*x.shape[:-1], size // 2)


def act_ops(fp8: bool) -> ActOps:
    """fp8: whether the device has e4m3; without it those results are the reference's."""
    ops = replace(reference.REFERENCE_ACT_OPS, silu_and_mul=silu_and_mul)
    return replace(ops, silu_and_mul_fp8=silu_and_mul_fp8) if fp8 else ops
