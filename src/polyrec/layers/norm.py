"""RMSNorm over the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..hardware.ops import NormOps


class RMSNorm(nn.Module):
    """norm(x, residual) -> (normalised x + residual, x + residual): the pair that travels through the stack."""

    def __init__(self, size: int, eps: float, ops: NormOps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self._rms_norm = ops.rms_norm
        self._add_rms_norm = ops.add_rms_norm

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """residual None: x opens the stream."""
        if residual is None:
            return self._rms_norm(x, self.weight, self.eps), x
        return self._add_rms_norm(x, residual, self.weight, self.eps)
