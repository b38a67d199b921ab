"""One operation: RMS norm, with the parameters of its reference in polyrec.hardware.ops.norm."""

from __future__ import annotations

import torch
from torch import Tensor

from polyrec.plugin_api import register_ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] / sqrt(mean(x²) + eps) · weight [D]; computed in fp32."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide / torch.sqrt(length.square() / x.shape[-1] + eps)).to(x.dtype) * weight


register_ops(norm={"rms_norm": rms_norm})
