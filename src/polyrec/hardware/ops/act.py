"""Activation ops and their meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ActOps:
    """silu_and_mul(x) -> silu(gate) · up, for x = [gate, up] along the last dim."""

    silu_and_mul: Callable[[Tensor], Tensor]


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 I] -> [..., I] (SwiGLU; Shazeer, 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


REFERENCE_ACT_OPS = ActOps(silu_and_mul=silu_and_mul)
