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


def weighted_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy`, with scale [N] -> (Σ scale · loss, fp32 []; the losses fp32 [N], without a gradient).

    Who knows the weights of a sum can make its gradient while the logits are there, where losses alone ask for them twice.
    """
    losses = linear_cross_entropy(hidden, weight, targets)
    return (losses * scale).sum(), losses.detach()


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


def _weighted_cases(draw: Draw) -> Iterator[Case]:
    for case in _loss_cases(draw):
        yield {**case, "scale": draw.uniform(len(case["targets"]), low=0.0, high=2.0, dtype=torch.float32)}


def _decompose_weighted(op: Lookup) -> Callable[..., tuple[Tensor, Tensor]]:
    linear_cross_entropy = op("loss.linear_cross_entropy")

    def sum_of_losses(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        losses = linear_cross_entropy(hidden, weight, targets)
        return (losses * scale).sum(), losses.detach()

    return sum_of_losses


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
    weighted_cross_entropy: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = field(
        metadata=op(
            weighted_cross_entropy,
            "hidden [N, D], weight [C, D], targets int64 [N], scale fp32 [N] -> fp32 [], fp32 [N]",
            _weighted_cases,
            tier="D",
            modes=TRAIN,
            needs=("loss.linear_cross_entropy",),
            decompose=_decompose_weighted,
            constants=("scale",),
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
