"""The whole search of one batch: a packed prefill, then S − 1 passes over the beams. No host decision on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from ..hardware.base.attention import AttentionPlan
from ..hardware.base.backend import HardwareBackend
from ..hardware.ops.search import Beams, TrieArrays
from ..kvcache.pool import KVPool
from ..layers.head import RestrictedHead
from ..models.spec import Decoder
from ..sid.layout import SidLayout
from ..sid.trie import Trie
from .batching import Batch


class Searcher:
    """Holds what all batches share: model, attention, head, the trie's arrays, the pool of prompt keys and values."""

    def __init__(
        self, model: Decoder, layout: SidLayout, trie: Trie, head: RestrictedHead, backend: HardwareBackend
    ) -> None:
        self._model = model
        self._layout = layout
        self._head = head
        self._ops = backend.ops
        move = backend.runtime.to_device
        self._trie = TrieArrays(
            move(torch.from_numpy(trie.first_child).long()), move(torch.from_numpy(trie.code).long())
        )
        # A level cannot hold more beams than it has nodes.
        self._level_nodes = [int(trie.level_starts[lv + 1] - trie.level_starts[lv]) for lv in range(1, trie.depth + 1)]
        weight = model.head_weight
        needs = model.attention_needs(weight.dtype)
        self.attention = backend.attention.build(needs, backend.ops)
        self._pool = KVPool(
            needs.num_layers, 0, needs.num_kv_heads, needs.head_dim, dtype=weight.dtype, device=weight.device
        )

    @torch.inference_mode()
    def search(self, batch: Batch) -> Beams:
        """-> the last level's beams, best first; node is a leaf."""
        hidden = self._prefill(batch)
        beams = self._first_level(hidden, batch)
        if self._layout.depth == 1:
            return beams
        requests = len(batch.lengths)
        # Of the S − 1 passes, all but the last have their keys and values read later.
        attention = self.attention.search(batch.layout, self._pool, width=batch.width, num_kept=self._layout.depth - 2)
        ancestors = torch.zeros((beams.node.numel(), 0), dtype=torch.int64, device=hidden.device)
        for level in range(1, self._layout.depth):
            last = level == self._layout.depth - 1
            hidden = self._pass(beams, batch, level, attention.step(ancestors, last=last))
            beams = self._step(hidden, level, beams, batch)
            ancestors = follow(ancestors, beams.parent, hidden.shape[0] // requests)
        return beams

    def _prefill(self, batch: Batch) -> Tensor:
        """Last hidden state of each prompt [R, D]; keys and values stay in the pool."""
        self._pool.reserve(len(batch.token_ids))
        plan = self.attention.packed(batch.layout, self._pool)
        return self._model(batch.token_ids, batch.positions, plan)[batch.last]

    def _first_level(self, hidden: Tensor, batch: Batch) -> Beams:
        root = torch.zeros((len(hidden), 1), dtype=torch.int64, device=hidden.device)
        beams = Beams(torch.zeros((len(hidden), 1), device=hidden.device), root, root)
        return self._step(hidden, 0, beams, batch)

    def _pass(self, beams: Beams, batch: Batch, level: int, plan: AttentionPlan) -> Tensor:
        """Runs the tokens that level `level` took -> hidden [R · W, D]."""
        tokens = self._layout.level_starts[level - 1] + self._trie.code[beams.node].clamp_min(0)
        positions = (batch.lengths + level - 1)[:, None].expand_as(tokens)
        return self._model(tokens.reshape(-1), positions.reshape(-1), plan)

    def _step(self, hidden: Tensor, level: int, beams: Beams, batch: Batch) -> Beams:
        logits, normalizer = self._head(hidden.view(*beams.node.shape, -1), level)
        width = min(batch.width, self._level_nodes[level])
        return self._ops.search.beam_step(logits, normalizer, beams, self._trie, batch.node_filter, batch.widths, width)


def follow(ancestors: Tensor, parent: Tensor, old_width: int) -> Tensor:
    """ancestors int64 [R · W, t] of the old beams, parent int64 [R, W'] -> [R · W', t + 1] of the new ones."""
    offset = torch.arange(parent.shape[0], device=parent.device)[:, None] * old_width
    row = (parent + offset).reshape(-1)
    return torch.cat((ancestors[row], row[:, None]), 1)
