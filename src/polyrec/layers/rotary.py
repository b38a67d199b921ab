"""Angles of the rotary embedding: computed once per batch, used by every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..hardware.ops import REFERENCE_ROPE_OPS, RopeOps


class RotaryAngles(nn.Module):
    """positions int64 [T] -> (cos, sin) fp32 [T, D / 2]."""

    inverse_frequency: Tensor

    def __init__(self, head_dim: int, theta: float, ops: RopeOps = REFERENCE_ROPE_OPS) -> None:
        super().__init__()
        self._head_dim = head_dim
        self._theta = theta
        self._angles = ops.angles
        self.register_buffer("inverse_frequency", self._computed(), persistent=False)

    def _computed(self) -> Tensor:
        """On the host, also where the model is built on another device or on none: it follows from the config alone."""
        exponent = torch.arange(0, self._head_dim, 2, dtype=torch.float32, device="cpu") / self._head_dim
        return 1.0 / self._theta**exponent

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves with the model, and stays fp32 and exact whatever dtype the model is cast to: in bf16 a position of 2,000
        would be off by whole radians."""
        super()._apply(fn, recurse)
        self.inverse_frequency = self._computed().to(self.inverse_frequency.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._angles(positions, self.inverse_frequency)
