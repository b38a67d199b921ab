"""Sampling ops and their meaning. logits [B, V] in any float; everything is computed and returned in fp32.

Randomness is an argument, so that every platform draws the same. Where entries tie, the lower index comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .draw import Draw
from .spec import INFER, Case, at_least_fp32, op, reference_group

DEAD = float("-inf")


def softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [B, V], temperature fp32 [B], above 0 -> probabilities of logits / temperature, fp32 [B, V]."""
    return (at_least_fp32(logits) / temperature[:, None]).softmax(-1)


def top_k_mask(logits: Tensor, k: Tensor) -> Tensor:
    """logits [B, V] -> fp32 [B, V]: the k (int64 [B], at least 1; V or more keeps all) largest of a row, −inf elsewhere."""
    wide = at_least_fp32(logits)
    order = wide.sort(dim=-1, descending=True, stable=True).indices
    rank = order.argsort(-1)
    return torch.where(rank < k[:, None], wide, DEAD)


def top_p_mask(logits: Tensor, p: Tensor) -> Tensor:
    """logits [B, V] -> fp32 [B, V]: the fewest most probable entries whose probabilities reach p (fp32 [B]; 1 or more keeps
    all), −inf elsewhere; at least one stays (Holtzman et al., 2020)."""
    wide = at_least_fp32(logits)
    sorted_logits, order = wide.sort(dim=-1, descending=True, stable=True)
    probability = sorted_logits.softmax(-1)
    before = probability.cumsum(-1) - probability
    kept = (before < p[:, None]) | (p[:, None] >= 1)
    kept[:, 0] = True
    return torch.where(torch.zeros_like(kept).scatter(-1, order, kept), wide, DEAD)


def gumbel_top_k(logits: Tensor, uniform: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of logits − log(−log uniform), best first: k draws without replacement (Kool et al., 2019).

    logits [B, V], uniform fp32 [B, V] in (0, 1) -> (perturbed logits fp32 [B, k], indices int64 [B, k]); k at most V.
    """
    perturbed = at_least_fp32(logits) - torch.log(-torch.log(uniform))
    values, indices = perturbed.sort(dim=-1, descending=True, stable=True)
    return values[:, :k].clone(), indices[:, :k].clone()


def penalize(logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Makes what occurred less likely; counts int64 [B, V], the three penalties fp32 [B] -> fp32 [B, V].

    Where counts > 0: a positive logit is divided by repetition, a negative one multiplied (Keskar et al., 2019); then
    presence + frequency · count is subtracted. 1, 0 and 0 change nothing.
    """
    wide = at_least_fp32(logits)
    seen, repetition = counts > 0, repetition[:, None]
    wide = torch.where(seen, torch.where(wide > 0, wide / repetition, wide * repetition), wide)
    return wide - presence[:, None] * seen - frequency[:, None] * counts


def mask(logits: Tensor, allowed: Tensor) -> Tensor:
    """logits [B, V] -> fp32 [B, V], −inf where allowed bool [B, V] is False."""
    return torch.where(allowed, at_least_fp32(logits), DEAD)


def _sizes(draw: Draw) -> tuple[tuple[int, int], ...]:
    return ((3, 24), (17, 200), (1, 7))[: 3 if draw.full else 1]


def _softmax_cases(draw: Draw) -> Iterator[Case]:
    for rows, size in _sizes(draw):
        temperature = draw.uniform(rows, low=0.3, high=2.0, dtype=torch.float32)
        yield {"logits": draw.normal(rows, size), "temperature": temperature}


def _top_k_cases(draw: Draw) -> Iterator[Case]:
    for rows, size in _sizes(draw):
        yield {"logits": draw.distinct_floats(rows, size, dtype=draw.dtype), "k": draw.integers(1, size + 2, rows)}


def _top_p_cases(draw: Draw) -> Iterator[Case]:
    for rows, size in _sizes(draw):
        p = draw.uniform(rows, low=0.1, high=0.95, dtype=torch.float32)
        p[-1] = 1.0
        yield {"logits": draw.distinct_floats(rows, size, dtype=draw.dtype), "p": p}


def _gumbel_cases(draw: Draw) -> Iterator[Case]:
    for rows, size in _sizes(draw):
        uniform = draw.uniform(rows, size, low=0.02, high=0.98, dtype=torch.float32)
        yield {"logits": draw.normal(rows, size), "uniform": uniform, "k": min(5, size)}


def _penalty_cases(draw: Draw) -> Iterator[Case]:
    for rows, size in _sizes(draw):
        penalties = {
            "repetition": draw.uniform(rows, low=1.0, high=1.5, dtype=torch.float32),
            "presence": draw.uniform(rows, low=-0.5, high=1.0, dtype=torch.float32),
            "frequency": draw.uniform(rows, low=-0.5, high=1.0, dtype=torch.float32),
        }
        yield {"logits": draw.normal(rows, size), "counts": draw.integers(0, 3, rows, size), **penalties}


def _mask_cases(draw: Draw) -> Iterator[Case]:
    for rows, size in _sizes(draw):
        yield {"logits": draw.normal(rows, size), "allowed": draw.integers(0, 2, rows, size).bool()}


@dataclass(frozen=True)
class SamplingOps:
    """From logits to draws; all optional, since the beam search needs none of them."""

    softmax: Callable[[Tensor, Tensor], Tensor] = field(
        metadata=op(
            softmax,
            "logits [B, V], temperature fp32 [B] -> fp32 [B, V]",
            _softmax_cases,
            tier="X",
            modes=INFER,
            strided=("logits",),
        )
    )
    top_k_mask: Callable[[Tensor, Tensor], Tensor] = field(
        metadata=op(
            top_k_mask,
            "logits [B, V], k int64 [B] -> fp32 [B, V]",
            _top_k_cases,
            tier="X",
            modes=INFER,
            strided=("logits",),
        )
    )
    top_p_mask: Callable[[Tensor, Tensor], Tensor] = field(
        metadata=op(
            top_p_mask,
            "logits [B, V], p fp32 [B] -> fp32 [B, V]",
            _top_p_cases,
            tier="X",
            modes=INFER,
            strided=("logits",),
        )
    )
    gumbel_top_k: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = field(
        metadata=op(
            gumbel_top_k,
            "logits [B, V], uniform fp32 [B, V] -> fp32 [B, k], int64 [B, k]",
            _gumbel_cases,
            tier="X",
            modes=INFER,
            strided=("logits",),
        )
    )
    penalize: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = field(
        metadata=op(
            penalize,
            "logits [B, V], counts int64 [B, V], repetition, presence, frequency fp32 [B] -> fp32 [B, V]",
            _penalty_cases,
            tier="X",
            modes=INFER,
            strided=("logits",),
        )
    )
    mask: Callable[[Tensor, Tensor], Tensor] = field(
        metadata=op(
            mask,
            "logits [B, V], allowed bool [B, V] -> fp32 [B, V]",
            _mask_cases,
            tier="X",
            modes=INFER,
            strided=("logits",),
        )
    )


REFERENCE_SAMPLING_OPS = reference_group(SamplingOps)
