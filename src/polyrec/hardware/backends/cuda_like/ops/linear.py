"""Products of e4m3 tensors on devices that multiply them."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ....ops.linear import REFERENCE_LINEAR_OPS
from ....ops.linear import scaled_mm as reference_scaled_mm
from ..differences import NVIDIA, build_of


def scaled_mm(
    q: Tensor, q_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`LinearOps.scaled_mm` in bf16 through torch._scaled_mm, whose row and channel scales are part of the kernel.

    It gives no other dtype with such scales, so those go to the reference, as do devices without e4m3 products.
    """
    if out_dtype != torch.bfloat16 or not multiplies_fp8(q.device):
        return reference_scaled_mm(q, q_scale, weight, weight_scale, bias, out_dtype)
    total = torch._scaled_mm(q, weight.t(), scale_a=q_scale, scale_b=weight_scale.t(), out_dtype=out_dtype)
    return total if bias is None else total + bias


@functools.cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device has e4m3 products; it never changes, and asking takes longer than a small product's launch."""
    if device.type != "cuda" or build_of(torch) != NVIDIA.build:
        return False
    return torch.cuda.get_device_capability(device) >= (NVIDIA.fp8_from or ())


CUDA_LIKE_LINEAR_OPS = replace(REFERENCE_LINEAR_OPS, scaled_mm=scaled_mm)
