"""The gated feed-forward block: one product for gate and up, SwiGLU, one product down."""

from __future__ import annotations

from torch import Tensor, nn

from ..hardware.ops import PlatformOps
from .linear import Linear


class GatedMLP(nn.Module):
    """x [T, D] -> [T, D] through I hidden units."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, ops: PlatformOps) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, (intermediate_size, intermediate_size), bias=False, ops=ops.linear)
        self.down_proj = Linear(intermediate_size, (hidden_size,), bias=False, ops=ops.linear)
        self._silu_and_mul = ops.act.silu_and_mul

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._silu_and_mul(self.gate_up_proj(x)))
