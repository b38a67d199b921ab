"""Losses over a slice of the head, and their meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .draw import Draw
from .spec import TRAIN, Case, Lookup, at_least_fp32, op, reference_group


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """hidden [N, D], weight [C, D], targets int64 [N] in 0…C−1 -> fp32 [N]: cross-entropy of hidden @ weightᵀ."""
    logits = at_least_fp32(torch.nn.functional.linear(hidden, weight))
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def token_logp(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target: −`linear_cross_entropy`, fp32 [N]."""
    logits = at_least_fp32(torch.nn.functional.linear(hidden, weight))
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def _loss_cases(draw: Draw) -> Iterator[Case]:
    for rows, dim, classes in ((3, 64, 24), (17, 128, 256))[: 2 if draw.full else 1]:
        yield {
            "hidden": draw.normal(rows, dim),
            "weight": draw.normal(classes, dim, scale=dim**-0.5),
            "targets": draw.integers(0, classes, rows),
        }


def _decompose_token_logp(op: Lookup) -> Callable[..., Tensor]:
    linear_cross_entropy = op("loss.linear_cross_entropy")

    def negative_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return -linear_cross_entropy(hidden, weight, targets)

    return negative_cross_entropy


@dataclass(frozen=True)
class LossOps:
    """What the head and the loss make of hidden states, without the logits having to exist all at once."""

    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor] = field(
        metadata=op(
            linear_cross_entropy,
            "hidden [N, D], weight [C, D], targets int64 [N] -> fp32 [N]",
            _loss_cases,
            tier="R",
            modes=TRAIN,
            rounds_inside=True,
        )
    )
    token_logp: Callable[[Tensor, Tensor, Tensor], Tensor] = field(
        metadata=op(
            token_logp,
            "hidden [N, D], weight [C, D], targets int64 [N] -> fp32 [N]",
            _loss_cases,
            tier="D",
            needs=("loss.linear_cross_entropy",),
            decompose=_decompose_token_logp,
            rounds_inside=True,
        )
    )


REFERENCE_LOSS_OPS = reference_group(LossOps)
