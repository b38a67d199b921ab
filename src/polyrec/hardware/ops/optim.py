"""What an optimizer's step asks of all gradients at once, and its meaning."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .draw import Draw
from .spec import TRAIN, Case, op, reference_group


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Tensors of any shapes on one device, dtypes may differ -> fp32 [] there: the Euclidean norm of all their numbers.

    Nothing is rounded to the gradients' dtype on the way, as torch.nn.utils.get_total_norm does: 0.2 % in bf16. Of no
    tensors it is zero, on the host.
    """
    if not gradients:
        return torch.zeros(())
    wide = functools.reduce(torch.promote_types, {one.dtype for one in gradients}, torch.float32)
    norm = functools.partial(torch.linalg.vector_norm, dtype=wide)
    # Rows first: a host's fp32 sum over 17 million numbers in one go is 7e-5 off.
    return norm(torch.cat([norm(one, dim=-1).flatten() for one in gradients]))


def _total_norm_cases(draw: Draw) -> Iterator[Case]:
    for shapes in (((3, 64), (7,)), ((2049, 65), (1,), (0, 8), (5, 3, 2), (17,)))[: 2 if draw.full else 1]:
        # Each has about the same share of the sum.
        yield {"gradients": [draw.normal(*shape, scale=max(math.prod(shape), 1) ** -0.5) for shape in shapes]}


@dataclass(frozen=True)
class OptimOps:
    """Between the backward pass and the update. Nothing here has a gradient itself or waits for the device."""

    total_norm: Callable[[Sequence[Tensor]], Tensor] = field(
        metadata=op(total_norm, "a sequence of [...] -> fp32 []", _total_norm_cases, tier="D", modes=TRAIN)
    )


REFERENCE_OPTIM_OPS = reference_group(OptimOps)
