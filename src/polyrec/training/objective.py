"""The training loss: cross-entropy of each code under its level's head, or under the whole vocabulary."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..attention.layout import packed_layout
from ..data.packing import PackedBatch
from ..hardware.base.attention import AttentionNeeds
from ..hardware.base.backend import HardwareBackend
from ..models.spec import Decoder
from ..sid.layout import SidLayout

Head = Literal["level", "vocab"]


class Loss(NamedTuple):
    """mean: weighted mean over all labels, with gradient. by_level: weighted mean of each level, detached fp32 [S]."""

    mean: Tensor
    by_level: Tensor


class Objective:
    """Runs a packed batch through the model and its heads. needs: what the model asks of attention in training."""

    def __init__(self, layout: SidLayout, head: Head, backend: HardwareBackend, needs: AttentionNeeds) -> None:
        self._layout = layout
        self._head = head
        self._cross_entropy = backend.ops.loss.linear_cross_entropy
        self._move = backend.runtime.to_device
        self._attention = backend.attention.build(needs, backend.ops)

    def __call__(self, model: Decoder, batch: PackedBatch) -> Loss:
        hidden = self._forward(model, batch)
        weight = model.head_weight
        totals, weights = [], []
        for level, labels in enumerate(batch.labels):
            first, size = self._layout.level_starts[level], self._layout.codebook_sizes[level]
            rows, offset = (weight[first : first + size], 0) if self._head == "level" else (weight, first)
            index, code, scale = (self._move(torch.from_numpy(x)) for x in (labels.index, labels.code, labels.weight))
            totals.append((self._cross_entropy(hidden[index], rows, code + offset) * scale).sum())
            weights.append(scale.sum())
        total, count = torch.stack(totals), torch.stack(weights)
        return Loss(total.sum() / count.sum().clamp_min(1e-8), (total / count.clamp_min(1e-8)).detach())

    def _forward(self, model: Decoder, batch: PackedBatch) -> Tensor:
        branch = torch.from_numpy(batch.branch)
        layout = packed_layout(torch.from_numpy(batch.lengths), branch if branch.any() else None, self._move)
        token_ids, positions = (self._move(torch.from_numpy(x)) for x in (batch.token_ids, batch.positions))
        return model(token_ids, positions, self._attention.packed(layout))
