"""The restricted head: a level's logits come from that level's rows of the head, not from the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.request import ScoreRule
from ..hardware.ops import PlatformOps


class LevelLogits(NamedTuple):
    """logits: fp32 [..., C] of one level. normalizer: fp32 [...] log-sum-exp to subtract, None for the rule `children`."""

    logits: Tensor
    normalizer: Tensor | None


class RestrictedHead:
    """Evaluates the head's rows of one level; what else a score rule needs is decided when it is built.

    weight: [V, D]. level_rows: (start, stop) of each level's rows. rule: DESIGN section 4.
    """

    def __init__(
        self, weight: Tensor, level_rows: tuple[tuple[int, int], ...], rule: ScoreRule, ops: PlatformOps
    ) -> None:
        self._mm = ops.linear.mm
        self._log_softmax = ops.search.restricted_log_softmax
        self._levels = [weight[start:stop] for start, stop in level_rows]  # views: no copy of the weight
        self._rule = rule
        self._weight = weight
        self._sid_weight = torch.cat(self._levels) if rule == "sid" else None

    def __call__(self, hidden: Tensor, level: int) -> LevelLogits:
        """hidden [..., D] (normed) and a level from 0 -> its logits and normaliser."""
        if self._rule == "level":
            return LevelLogits(*self._log_softmax(hidden, self._levels[level]))
        logits = self._mm(hidden, self._levels[level], None).float()
        if self._rule == "children":
            return LevelLogits(logits, None)
        weight = self._weight if self._sid_weight is None else self._sid_weight
        return LevelLogits(logits, self._mm(hidden, weight, None).float().logsumexp(-1))
