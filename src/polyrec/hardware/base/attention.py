"""The seam between the model and attention: a batch is planned once, then every layer runs through the plan.

A model's layer knows only `AttentionPlan.run`. Which tokens see which, where keys and values are kept, and which kernel does
it is the plan's business, so training, prefill and a beam pass go through one and the same model code.
"""

from __future__ import annotations

from typing import Protocol

import torch


class AttentionPlan(Protocol):
    """One batch's attention, for all layers."""

    def run(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one layer. query [T, heads, D], key and value [T, kv heads, D], rotated -> [T, heads · D]."""
        ...
