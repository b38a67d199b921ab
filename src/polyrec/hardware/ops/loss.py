"""Losses over a slice of the head, and their meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossOps:
    """linear_cross_entropy(hidden, weight, targets) -> per-row loss: cross-entropy of hidden @ weightᵀ."""

    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """hidden [N, D], weight [C, D], targets int64 [N] in 0…C−1 -> fp32 [N]."""
    logits = torch.nn.functional.linear(hidden, weight).float()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


REFERENCE_LOSS_OPS = LossOps(linear_cross_entropy=linear_cross_entropy)
