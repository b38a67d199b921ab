"""RMSNorm through one Triton kernel, alone, after the residual's sum and with quantised rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....ops import norm as reference
from ....ops.linear import Fp8Rows
from ....ops.norm import NormOps
from ....ops.spec import FP8
from .launch import kernels, runs_kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`NormOps.rms_norm`, rounded once."""
    if not runs_kernel(x, weight):
        return reference.rms_norm(x, weight, eps)
    out = x.new_empty(x.shape)
    kernels("norm").rms_norm(x, None, weight, eps, out, None, None)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`NormOps.add_rms_norm`."""
    if not runs_kernel(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    kernels("norm").rms_norm(x, residual, weight, eps, out, None, total)
    return out, total


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


def norm_ops(fp8: bool) -> NormOps:
    """fp8: whether the device has e4m3; without it those results are the reference's."""
    ops = replace(reference.REFERENCE_NORM_OPS, rms_norm=rms_norm, add_rms_norm=add_rms_norm)
    return replace(ops, rms_norm_fp8=rms_norm_fp8, add_rms_norm_fp8=add_rms_norm_fp8) if fp8 else ops
