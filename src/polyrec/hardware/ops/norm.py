"""Normalisation ops and their meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormOps:
    """rms_norm(x, weight, eps) -> y. add_rms_norm(x, residual, weight, eps) -> (y, x + residual)."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] · rsqrt(mean(x²) + eps) · weight [D]; the mean in fp32 (Zhang and Sennrich, 2019)."""
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and residual [..., D] -> (rms_norm(x + residual) [..., D], x + residual): the residual stream grows by x."""
    total = x + residual
    return rms_norm(total, weight, eps), total


REFERENCE_NORM_OPS = NormOps(rms_norm=rms_norm, add_rms_norm=add_rms_norm)
