"""The whole search of one batch: a packed prefill, then S − 1 passes over the beams. No host decision on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.layout import packed_layout
from ..hardware.base.attention import AttentionBackend, AttentionPlan, PackedLayout, WriteTarget
from ..hardware.base.backend import HardwareBackend
from ..hardware.ops.linear import QuantizedRows
from ..hardware.ops.search import Beams, NodeFilter, PassRows, TrieArrays
from ..kvcache.pool import KVPool
from ..layers.head import RestrictedHead
from ..models.spec import Decoder
from ..sid.layout import SidLayout
from ..sid.trie import Trie
from .batching import Batch

# Tokens of a prefill from which on the last layer's queries are those of prompts' last rows alone. Listing how they read their
# prompts costs some launches; where that begins to pay was not measured.
LAST_ROWS_FROM = 1025
# Of a prefill: they keep a device busy until the host has launched the others, some 0.3 ms on a slow host.
FIRST_LAYERS = 3


@dataclass(frozen=True)
class Prompts:
    """token_ids: int64 [T], packed: what is not cached of each prompt."""

    token_ids: Tensor
    layout: PackedLayout


def make_prompts(batch: Batch, to_device: Callable[[Tensor], Tensor]) -> Prompts:
    """The batch's prompts on the device. to_device: the runtime's copy."""
    return Prompts(to_device(batch.token_ids), packed_layout(batch.lengths, to_device=to_device, table=batch.table))


@dataclass(frozen=True)
class SearchInputs:
    """hidden: [R, D], the prefill's last state of each prompt. widths: int64 [R], beams of each request; width: at least
    the largest."""

    hidden: Tensor
    layout: PackedLayout
    widths: Tensor
    width: int
    node_filter: NodeFilter | None


class Searcher:
    """Holds what all batches share: model, attention, head, the trie's arrays, the pool of prompt keys and values."""

    def __init__(
        self,
        model: Decoder,
        layout: SidLayout,
        trie: Trie,
        head: RestrictedHead,
        attention: AttentionBackend,
        pool: KVPool,
        backend: HardwareBackend,
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
        self.head_weight = model.head_weight
        self.attention = attention
        self.pool = pool
        # Where a lone search begins: filled once, so that a recorded one need not do it again.
        self._root = torch.zeros((1, 1), dtype=torch.int64, device=self.head_weight.device)
        self._root_score = torch.zeros((1, 1), device=self.head_weight.device)

    @torch.inference_mode()
    def prefill(self, prompts: Prompts, after_first_layers: Callable[[], None] | None = None) -> Tensor:
        """Last hidden state of each prompt [R, D]; keys and values stay in the pool, in the prompts' pages.

        after_first_layers: called once the first FIRST_LAYERS layers are queued.
        """
        layout = prompts.layout.located_by(self._ops.kv.locate)
        plan = self.attention.packed(layout, self.pool)
        of_last = self._plan_of_last(layout, plan)
        if after_first_layers is not None:
            plan = Told(plan, after_first_layers)
        return self._model(prompts.token_ids, layout.positions, plan, layout.last, of_last)

    def _plan_of_last(self, layout: PackedLayout, plan: AttentionPlan) -> AttentionPlan | None:
        """How prompts' last rows attend; None: with all others. Pages of another dtype hold other keys than those that the
        others read. plan: of all rows; where it writes keys and values itself, all attend."""
        attention = self.attention
        kept_as_read = attention.support.prefix and self.pool.keys.dtype == attention.needs.dtype
        if layout.table is None or layout.num_tokens < LAST_ROWS_FROM or not kept_as_read:
            return None
        if plan.target(attention.needs.num_layers - 1) is None:
            return None
        return attention.packed(layout.of_last.located_by(self._ops.kv.locate), self.pool)

    @torch.inference_mode()
    def search(self, inputs: SearchInputs) -> Beams:
        """-> the last level's beams, best first; node is a leaf. The layout's prompts are in the pool."""
        beams = self._first_level(inputs.hidden, inputs)
        if self._layout.depth == 1:
            return beams
        # Of the S − 1 passes, all but the last have their keys and values read later.
        num_kept = self._layout.depth - 2
        attention = self.attention.search(inputs.layout, self.pool, width=inputs.width, num_kept=num_kept)
        rows: PassRows | None = None
        for level in range(1, self._layout.depth):
            rows = self._next_rows(beams, rows, inputs, level)
            last = level == self._layout.depth - 1
            hidden = self._pass(rows, attention.step(rows.ancestors, last=last))
            beams = self._step(hidden, level, beams, inputs)
        return beams

    def _first_level(self, hidden: Tensor, inputs: SearchInputs) -> Beams:
        root, score = self._root, self._root_score
        if len(hidden) > 1:
            root = torch.zeros((len(hidden), 1), dtype=torch.int64, device=hidden.device)
            score = torch.zeros((len(hidden), 1), device=hidden.device)
        return self._step(hidden, 0, Beams(score, root, root), inputs)

    def _next_rows(self, beams: Beams, before: PassRows | None, inputs: SearchInputs, level: int) -> PassRows:
        """What the pass before level `level` runs: the tokens just chosen. before: what the last pass ran."""
        ancestors = None if before is None else before.ancestors
        level_start = self._layout.level_starts[level - 1]
        return self._ops.search.next_rows(beams, ancestors, self._trie.code, inputs.layout.prompt_lengths, level_start)

    def _pass(self, rows: PassRows, plan: AttentionPlan) -> Tensor:
        """-> hidden [R · W, D]."""
        return self._model(rows.token_ids, rows.positions, plan)

    def _step(self, hidden: Tensor, level: int, beams: Beams, inputs: SearchInputs) -> Beams:
        logits, normalizer = self._head(hidden.view(*beams.node.shape, -1), level)
        width = min(inputs.width, self._level_nodes[level])
        return self._ops.search.beam_step(
            logits, normalizer, beams, self._trie, inputs.node_filter, inputs.widths, width
        )


class Told(AttentionPlan):
    """Another plan; `after_first_layers` is called before the first layer behind those attends."""

    def __init__(self, plan: AttentionPlan, after_first_layers: Callable[[], None]) -> None:
        self._plan = plan
        self._after_first_layers = after_first_layers

    def target(self, layer: int) -> WriteTarget | None:
        return self._plan.target(layer)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | QuantizedRows:
        self._tell(layer)
        return self._plan.run(layer, query, key, value)

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | QuantizedRows:
        self._tell(layer)
        return self._plan.run_written(layer, query, key, value)

    def _tell(self, layer: int) -> None:
        if layer == FIRST_LAYERS:
            self._after_first_layers()
