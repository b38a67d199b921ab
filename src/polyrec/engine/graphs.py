"""Recorded prefills and searches: the shapes they are recorded for, and how a batch is put into the nearest larger one.

What a batch is rounded up with never lives: a request that is not there has no beams, and a beam beyond a request's own width
is dead. Lengths, widths and filters are device data. Prompts longer than the largest recorded prefill run without a graph,
which costs nothing there: the device is busier than the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from pydantic import Field
from torch import Tensor

from ..attention.layout import packed_layout
from ..core.config import Settings
from ..hardware.base.attention import PackedLayout
from ..hardware.base.backend import HardwareBackend
from ..hardware.base.graph import CapturedGraph
from ..hardware.ops.search import Beams, NodeFilter
from .batching import Batch
from .search import Prompts, Searcher, SearchInputs

NO_KEY = torch.iinfo(torch.int64).max


class GraphSizes(Settings):
    """What is recorded. requests, widths: of a search; tokens: of a prefill; filter_keys: room for nodes that filters list.

    max_tokens: the longest batch, which the pool of keys and values has room for. max_rows: requests · width of a search.
    """

    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    widths: tuple[int, ...] = (16, 32, 50, 64, 128, 256, 512, 1024)
    tokens: tuple[int, ...] = (128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096)
    filter_keys: int = Field(65_536, ge=1)
    max_tokens: int = Field(16_384, ge=1)
    max_rows: int = Field(16_384, ge=1)


def graph_sizes(max_width: int) -> GraphSizes:
    """The usual sizes for requests of at most `max_width` beams."""
    usual = GraphSizes()
    return usual.model_copy(update={"widths": (*(width for width in usual.widths if width < max_width), max_width)})


class Fallback(Protocol):
    """Runs what fits no recorded shape."""

    num_batches: int

    def run(self, batch: Batch) -> Beams: ...


@dataclass(frozen=True)
class RecordedSearch:
    """One recorded search. What it reads: hidden [R, D], lengths, widths int64 [R] and, if it filters, keys and allow."""

    graph: CapturedGraph
    hidden: Tensor
    lengths: Tensor
    widths: Tensor
    node_filter: NodeFilter | None


@dataclass(frozen=True)
class RecordedPrefill:
    """One recorded prefill, of at most as many requests as the largest search. hidden: its result, [R, D]."""

    graph: CapturedGraph
    token_ids: Tensor
    positions: Tensor
    lengths: Tensor
    last: Tensor
    hidden: Tensor


class GraphRunner:
    """Records on first use of a shape, or before with `record_all`; at most one batch is on its way to the device at a time.

    The pool of keys and values is made once for the longest batch: recorded kernels know where it lies.
    """

    def __init__(self, searcher: Searcher, backend: HardwareBackend, sizes: GraphSizes, fallback: Fallback) -> None:
        self._searcher = searcher
        self._backend = backend
        self._sizes = sizes
        self._fallback = fallback
        self._memory_pool = backend.graph.new_pool()
        self._searches: dict[tuple[int, int, bool], RecordedSearch] = {}
        self._prefills: dict[int, RecordedPrefill] = {}
        self.num_batches = 0
        self.num_replays = 0
        searcher.pool.reserve(sizes.max_tokens)

    def run(self, batch: Batch) -> Beams:
        """The finished beams of one batch, on the device: [R, W], views of what the next replay overwrites."""
        self.num_batches += 1
        shape = self._shape_of(batch)
        if shape is None:
            if len(batch.token_ids) > self._searcher.pool.num_slots:
                self._forget()
            return self._fallback.run(batch)
        hidden = self._prefill(batch)
        search = self._search_of(shape)
        self._fill(search, hidden, batch)
        self._searcher.attention.refresh({"lengths": search.lengths})
        search.graph.update({"lengths": search.lengths})
        beams: Beams = search.graph.replay()
        self.num_replays += 1
        requests, width = len(batch.lengths), batch.width
        return Beams(*(part[:requests, :width] for part in (beams.score, beams.node, beams.parent)))

    def record_all(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Records every shape that the sizes name, so that no request waits for one."""
        for tokens in self._sizes.tokens:
            self._prefill_of(tokens)
            if on_progress:
                on_progress(f"prefill of {tokens} tokens")
        for width in self._sizes.widths:
            for requests in self._sizes.requests:
                if requests * width <= self._sizes.max_rows:
                    self._search_of((requests, width, False))
                    if on_progress:
                        on_progress(f"search of {requests} requests, {width} beams")

    def _forget(self) -> None:
        """The pool is about to move to make room for a longer batch, and recorded kernels know where it lay."""
        recorded: list[RecordedSearch | RecordedPrefill] = [*self._searches.values(), *self._prefills.values()]
        for each in recorded:
            each.graph.close()
        self._searches.clear()
        self._prefills.clear()

    def _shape_of(self, batch: Batch) -> tuple[int, int, bool] | None:
        """(requests, width, filtered) of the search that takes the batch; None when it fits none."""
        sizes, found = self._sizes, batch.node_filter
        requests, width = first_from(len(batch.lengths), sizes.requests), first_from(batch.width, sizes.widths)
        if requests is None or width is None or requests * width > sizes.max_rows:
            return None
        if len(batch.token_ids) > sizes.max_tokens or (found is not None and len(found.keys) > sizes.filter_keys):
            return None
        return requests, width, found is not None

    def _prefill(self, batch: Batch) -> Tensor:
        """Hidden states [at least R, D]."""
        num_tokens, num_requests = len(batch.token_ids), len(batch.lengths)
        move = self._backend.runtime.to_device
        tokens = first_from(num_tokens, self._sizes.tokens)
        if tokens is None:
            layout = packed_layout(batch.lengths, to_device=move)
            return self._searcher.prefill(
                Prompts(move(batch.token_ids), move(batch.positions), move(batch.last), layout)
            )
        prefill = self._prefill_of(tokens)
        for buffer, value in (
            (prefill.token_ids, batch.token_ids),
            (prefill.positions, batch.positions),
            (prefill.last, batch.last),
        ):
            buffer[: len(value)].copy_(self._backend.runtime.pin(value), non_blocking=True)
        prefill.lengths.copy_(self._backend.runtime.pin(padded(batch.lengths, len(prefill.lengths))), non_blocking=True)
        hidden: Tensor = prefill.graph.replay()
        self.num_replays += 1
        return hidden[:num_requests]

    def _fill(self, search: RecordedSearch, hidden: Tensor, batch: Batch) -> None:
        pin, found = self._backend.runtime.pin, batch.node_filter
        search.hidden[: len(batch.lengths)].copy_(hidden)
        places = len(search.lengths)
        search.lengths.copy_(pin(padded(batch.lengths, places)), non_blocking=True)
        search.widths.copy_(pin(padded(batch.widths, places)), non_blocking=True)
        if search.node_filter is not None and found is not None:
            search.node_filter.keys.fill_(NO_KEY)
            search.node_filter.keys[: len(found.keys)].copy_(pin(found.keys), non_blocking=True)
            search.node_filter.allow.copy_(pin(padded(found.allow, places)), non_blocking=True)

    def _prefill_of(self, tokens: int) -> RecordedPrefill:
        if tokens not in self._prefills:
            self._prefills[tokens] = self._record_prefill(tokens)
        return self._prefills[tokens]

    def _search_of(self, shape: tuple[int, int, bool]) -> RecordedSearch:
        if shape not in self._searches:
            self._searches[shape] = self._record_search(*shape)
        return self._searches[shape]

    def _record_prefill(self, tokens: int) -> RecordedPrefill:
        places, make = max(self._sizes.requests), self._zeros
        token_ids, positions, lengths, last = make(tokens), make(tokens), make(places), make(places)
        lengths[0] = tokens
        positions.copy_(torch.arange(tokens))

        def run() -> Tensor:  # the layout is made anew: what it derives from lengths belongs to the recording
            layout = PackedLayout(lengths, tokens, tokens)
            return self._searcher.prefill(Prompts(token_ids, positions, last, layout))

        graph = self._backend.graph.capture(run, self._memory_pool)
        return RecordedPrefill(graph, token_ids, positions, lengths, last, graph.replay())

    def _record_search(self, requests: int, width: int, filtered: bool) -> RecordedSearch:
        make = self._zeros
        weight = self._searcher.head_weight
        hidden = torch.zeros((requests, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        lengths, widths = make(requests) + 1, make(requests) + width
        node_filter = None
        if filtered:
            keys = torch.full((self._sizes.filter_keys,), NO_KEY, device=weight.device)
            node_filter = NodeFilter(keys, make(requests).bool(), self._searcher.num_nodes)

        def run() -> Beams:
            layout = PackedLayout(lengths, self._sizes.max_tokens, self._sizes.max_tokens)
            return self._searcher.search(SearchInputs(hidden, layout, widths, width, node_filter))

        graph = self._backend.graph.capture(run, self._memory_pool)
        return RecordedSearch(graph, hidden, lengths, widths, node_filter)

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._searcher.head_weight.device)


def first_from(number: int, rising: tuple[int, ...]) -> int | None:
    """The first of the rising sizes that is not below `number`."""
    place = bisect_left(rising, number)
    return rising[place] if place < len(rising) else None


def padded(values: Tensor, places: int) -> Tensor:
    """The values with zeros behind them."""
    return torch.nn.functional.pad(values, (0, places - len(values)))
