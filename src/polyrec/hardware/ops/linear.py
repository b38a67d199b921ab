"""Matrix products and their meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearOps:
    """mm(x, weight, bias) -> x @ weightᵀ + bias."""

    mm: Callable[[Tensor, Tensor, Tensor | None], Tensor]


def mm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] or None -> [..., out]."""
    return torch.nn.functional.linear(x, weight, bias)


REFERENCE_LINEAR_OPS = LinearOps(mm=mm)
