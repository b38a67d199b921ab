"""From a history to the token ids of a prompt: the one builder for training, evaluation and serving. Imports no torch.

A prompt is the history's SIDs, oldest first, and ends with the forced `<|sid_begin|>`, after which the next item's SID is due.
With `basket_token`, `<|sid_begin|>` also stands before each basket of the history, so that the end of a prompt looks to the
model like the start of every earlier basket did.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from ..core.config import Settings
from ..core.files import value_digest
from ..sid.layout import SidLayout


class PromptConfig(Settings):
    """max_items: longest history. block: the oldest items leave this many at a time, so that prefixes stay stable and cached;
    at most max_items, or a cut could take the whole history. basket_token: `<|sid_begin|>` before each basket."""

    max_items: int = Field(40, ge=1)
    block: int = Field(1, ge=1)
    basket_token: bool = True

    @model_validator(mode="after")
    def _something_stays(self) -> PromptConfig:
        if self.block > self.max_items:
            raise ValueError(f"block {self.block} is more than max_items {self.max_items}")
        return self

    @property
    def digest(self) -> str:
        """Changes whenever a prompt would."""
        return value_digest({"name": "sid-history", **self.model_dump()})


def num_dropped(num_items: int, config: PromptConfig) -> int:
    """How many of the oldest items a history of `num_items` loses: the one rule of cutting, for every path."""
    over = max(0, num_items - config.max_items)
    return -(-over // config.block) * config.block


class PromptBuilder:
    """Builds prompts of one layout and config."""

    def __init__(self, layout: SidLayout, config: PromptConfig) -> None:
        self.layout = layout
        self.config = config
        self._level_starts = np.array(layout.level_starts, np.int64)

    @property
    def max_tokens(self) -> int:
        """The longest prompt."""
        return self.config.max_items * (self.layout.depth + int(self.config.basket_token)) + 1

    def build(self, codes: np.ndarray, baskets: np.ndarray | None) -> np.ndarray:
        """codes int [N, S] oldest first, baskets int [N] non-decreasing (None: each item is one of its own) -> token ids int64
        [T]."""
        dropped = num_dropped(len(codes), self.config)
        codes, depth = codes[dropped:], self.layout.depth
        if not self.config.basket_token:
            ids = self._begins(len(codes) * depth + 1)
            np.add(codes, self._level_starts, out=ids[:-1].reshape(len(codes), depth))
            return ids
        if baskets is None or (opens := basket_starts(baskets[dropped:])).all():  # a table
            ids = self._begins(len(codes) * (depth + 1) + 1)
            np.add(codes, self._level_starts, out=ids[:-1].reshape(len(codes), depth + 1)[:, 1:])
            return ids
        # Each item takes S places, and one more where it opens a basket.
        end = np.cumsum(depth + opens)
        ids = self._begins(int(end[-1]) + 1)
        places = end[:, None] - depth + np.arange(depth)
        ids[places] = codes + self._level_starts
        return ids

    def _begins(self, num: int) -> np.ndarray:
        """`<|sid_begin|>` in each place, int64 [num]; numpy.full takes three times as long."""
        ids = np.empty(num, np.int64)
        ids.fill(self.layout.begin)
        return ids


def basket_starts(baskets: np.ndarray) -> np.ndarray:
    """bool [N]: True at the first item of each basket."""
    opens = np.ones(len(baskets), bool)
    opens[1:] = baskets[1:] != baskets[:-1]
    return opens
