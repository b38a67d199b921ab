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
    """Runs a packed batch through the model and its heads. needs: what the model asks of attention in training. runtime: the
    device's on which it does."""

    def __init__(self, layout: SidLayout, head: Head, backend: HardwareBackend, needs: AttentionNeeds) -> None:
        self._layout = layout
        self._head = head
        self._cross_entropy = backend.ops.loss.weighted_cross_entropy
        self.runtime = backend.runtime
        self._move = backend.runtime.to_device
        self._attention = backend.attention.build(needs, backend.ops)

    def __call__(self, model: Decoder, batch: PackedBatch) -> Loss:
        hidden, weight = self._forward(model, batch)
        index, code, scale = (
            [self._move(torch.from_numpy(getattr(labels, name))) for labels in batch.labels]
            for name in ("index", "code", "weight")
        )
        counts = torch.stack([part.sum() for part in scale])
        whole = counts.sum().clamp_min(1e-8)
        # Weights that sum to one: the mean is then their sum itself, and who has made the sum's gradient need not divide it.
        shares = [part / whole for part in scale]
        sum_up = self._over_levels if self._head == "level" else self._over_vocabulary
        mean, of_levels = sum_up(weight, hidden, index, code, shares)
        return Loss(mean, (of_levels * (whole / counts.clamp_min(1e-8))).detach())

    def _over_levels(self, weight: Tensor, hidden: Tensor, *labels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Each level's labels under its own rows of the head -> Σ scale · loss over all, and of each level [S]."""
        totals = []
        starts, sizes = self._layout.level_starts, self._layout.codebook_sizes
        low, high = min(starts), max(first + size for first, size in zip(starts, sizes, strict=True))
        codes = weight[
            low:high
        ]  # a slice's gradient is as large as what it is cut from: only this one's as the vocabulary
        for first, size, index, code, scale in zip(starts, sizes, *labels, strict=True):
            rows = codes[first - low : first - low + size]
            total, _ = self._cross_entropy(hidden[index], rows, code, scale)
            totals.append(total)
        of_levels = torch.stack(totals)
        return of_levels.sum(), of_levels

    def _over_vocabulary(self, weight: Tensor, hidden: Tensor, *labels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """All labels under the whole head in one product -> the same."""
        index, code, scale = labels
        tokens = torch.cat([part + first for part, first in zip(code, self._layout.level_starts, strict=True)])
        total, losses = self._cross_entropy(hidden[torch.cat(index)], weight, tokens, torch.cat(scale))
        parts = losses.split([len(part) for part in scale])
        return total, torch.stack([(own * part).sum() for own, part in zip(parts, scale, strict=True)])

    def _forward(self, model: Decoder, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """-> hidden states [T, D]; the head's weight [V, D]."""
        # One branch only goes on where its prompt ends: plain causal attention, which needs no mask.
        branch = torch.from_numpy(batch.branch) if (batch.branch > 1).any() else None
        layout = packed_layout(torch.from_numpy(batch.lengths), branch, self._move)
        token_ids, positions = (self._move(torch.from_numpy(x)) for x in (batch.token_ids, batch.positions))
        embedded, weight = model.embed(token_ids)
        return model(token_ids, positions, self._attention.packed(layout), embedded=embedded), weight
