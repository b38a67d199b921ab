"""The search's operations with the CPU's own matrix product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ....ops.search import REFERENCE_SEARCH_OPS, SearchOps
from ....ops.spec import at_least_fp32

Mm = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def cpu_search_ops(mm: Mm) -> SearchOps:
    """mm: the product chosen for this machine, so that the head's logits are the same under every score rule."""

    def restricted_log_softmax(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = at_least_fp32(mm(hidden, weight, None))
        return logits, logits.logsumexp(-1)

    return replace(REFERENCE_SEARCH_OPS, restricted_log_softmax=restricted_log_softmax)
