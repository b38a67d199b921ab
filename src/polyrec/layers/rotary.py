"""Angles of the rotary embedding: computed once per batch, used by every layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryAngles(nn.Module):
    """positions int64 [T] -> (cos, sin) fp32 [T, D / 2]."""

    inverse_frequency: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        # Not saved: it follows from the config. It stays fp32 whatever dtype the model is cast to.
        self.register_buffer("inverse_frequency", 1.0 / theta**exponent, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[:, None].float() * self.inverse_frequency.float()
        return angle.cos(), angle.sin()
