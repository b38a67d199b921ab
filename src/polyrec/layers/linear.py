"""Linear layers; several projections of one input are one product, split by views."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..hardware.ops import LinearOps


class Linear(nn.Module):
    """x [..., in] -> [..., sum(parts)]. parts: output sizes of the projections merged here (one, or q/k/v, or gate/up)."""

    def __init__(self, in_features: int, parts: tuple[int, ...], *, bias: bool, ops: LinearOps) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts), in_features))
        self.bias = nn.Parameter(torch.zeros(sum(parts))) if bias else None
        self._mm = ops.mm

    def forward(self, x: Tensor) -> Tensor:
        return self._mm(x, self.weight, self.bias)
