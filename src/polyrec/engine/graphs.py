"""Recorded prefills and searches: the shapes they are recorded for, and how a batch is put into the nearest larger one.

What a batch is rounded up with never lives: a request that is not there has no beams, and a beam beyond a request's own width
is dead. Lengths, widths and filters are device data. Batches beyond the largest recorded prefill run without a graph, which
costs little there: on an H200 the host launches a prefill of 28 layers in some 30 ms, in which the device does 8,000 tokens.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from ..core.config import Settings
from ..hardware.base.attention import HostPlan, PackedLayout
from ..hardware.base.backend import HardwareBackend
from ..hardware.base.graph import CapturedGraph
from ..hardware.ops.search import Beams
from .batching import Batch
from .inputs import BatchInputs
from .search import Prompts, Searcher, SearchInputs, make_prompts

# Prefills of so few tokens after cached ones are recorded once more, for batches in which every prompt's beginning is cached,
# as that of a returning user alone: without the launches that serve whole prompts, one a layer. Those save 0.07 of 4.9 ms on an
# H200 (25 tokens after 2,432, n 50); for how many tokens that is worth a recording is an estimate.
MOST_ALL_BEGUN = 128


class GraphSizes(Settings):
    """What is recorded. requests, widths: of a search; tokens: of a prefill; rest_tokens: of a prefill of which some prompts'
    beginnings are cached; filter_nodes: room for those that a batch's filters list. max_rows: requests · width of a search.
    """

    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    widths: tuple[int, ...] = (16, 32, 50, 64, 128, 256, 512, 1024)
    tokens: tuple[int, ...] = (
        *range(128, 1024, 128),
        *range(1024, 2048, 256),
        *range(2048, 16_384 + 1, 512),
    )
    rest_tokens: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    filter_nodes: int = Field(65_536, ge=1)
    max_rows: int = Field(16_384, ge=1)


def graph_sizes(max_width: int) -> GraphSizes:
    """The usual sizes for requests of at most `max_width` beams."""
    usual = GraphSizes()
    return usual.model_copy(update={"widths": (*(width for width in usual.widths if width < max_width), max_width)})


class Fallback(Protocol):
    """Runs what fits no recorded shape."""

    num_batches: int

    def run(self, batch: Batch) -> Beams: ...


class PrefillShape(NamedTuple):
    """What a prefill is recorded for: its most tokens, whether prompts' beginnings are cached, and whether every one's is."""

    tokens: int
    cached: bool
    all_begun: bool

    def __str__(self) -> str:
        of_all = ", of every prompt" * self.all_begun
        return f"prefill of {self.tokens} tokens" + " after cached ones" * self.cached + of_all


class SearchShape(NamedTuple):
    """What a search is recorded for: its most requests, and its width. Whether it filters is device data."""

    requests: int
    width: int

    def __str__(self) -> str:
        return f"search of {self.requests} requests, {self.width} beams"


@dataclass(frozen=True)
class RecordedPrefill:
    """One recorded prefill of so many tokens, and what its attention is told before each replay."""

    graph: CapturedGraph
    tokens: int
    host_plan: HostPlan | None


@dataclass(frozen=True)
class RecordedSearch:
    """One recorded search of so many requests, and what its attention is told before each replay. It reads the batch's inputs
    and the prefill's results."""

    graph: CapturedGraph
    requests: int
    host_plan: HostPlan | None


class GraphRunner:
    """Records on first use of a shape, or before with `record_all`. A batch's inputs are copied in the stream that replays, so
    the next one may be given while the device still works on this.

    max_prompt: tokens of the longest prompt. page_size: tokens of a page of the pool.
    """

    def __init__(
        self,
        searcher: Searcher,
        backend: HardwareBackend,
        sizes: GraphSizes,
        fallback: Fallback,
        *,
        max_prompt: int,
        page_size: int,
    ) -> None:
        self._searcher = searcher
        self._backend = backend
        self._sizes = sizes
        self._fallback = fallback
        self._memory_pool = backend.graph.new_pool()
        self._searches: dict[SearchShape, RecordedSearch] = {}
        self._prefills: dict[PrefillShape, RecordedPrefill] = {}
        self._tokens = {cached: self._recorded_tokens(cached) for cached in (False, True)}
        self._inputs = BatchInputs(
            max(sizes.requests),
            max((*self._tokens[False], *self._tokens[True]), default=0),
            sizes.filter_nodes,
            max_prompt,
            page_size,
            backend.runtime,
            searcher.head_weight.device,
        )
        # What a prefill leaves for the search: each prompt's last hidden state [places, D], from one recording to the next.
        weight = searcher.head_weight
        self._hidden = torch.zeros((max(sizes.requests), weight.shape[1]), dtype=weight.dtype, device=weight.device)
        self.places = sizes.requests
        self.num_batches = 0
        self.num_replays = 0

    def run(self, batch: Batch) -> Beams:
        """The finished beams of one batch, on the device: [R, W], views of what the next replay overwrites."""
        self.num_batches += 1
        shape = self._shape_of(batch)
        if shape is None:
            return self._fallback.run(batch)
        prefill, search = self._prefill_for(batch), self._search_of(shape)
        self._inputs.fill(batch, 0 if prefill is None else prefill.tokens)
        try:
            return self._launch(batch, prefill, search)
        finally:  # also where a part of it was queued before a fault
            self._inputs.launched()

    @property
    def num_unrecorded(self) -> int:
        return self._fallback.num_batches

    def rehearse(self, batch: Batch) -> None:
        """Copies its inputs to where nobody reads them."""
        if self._shape_of(batch) is not None:
            prefill = self._prefill_for(batch)
            self._inputs.rehearse(batch, 0 if prefill is None else prefill.tokens)

    def record_all(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Records every shape that the sizes name, so that no request waits for one. Large ones come first: the others then fit
        into the memory that these left in the graphs' pool."""
        for cached in (False, True):
            for tokens in reversed(self._tokens[cached]):
                for all_begun in (False, True) if cached and self._may_be_begun(tokens) else (False,):
                    shape = PrefillShape(tokens, cached, all_begun)
                    self._prefill_of(shape)
                    if on_progress:
                        on_progress(str(shape))
        for width, requests in product(reversed(self._sizes.widths), reversed(self._sizes.requests)):
            if requests * width <= self._sizes.max_rows:
                search = SearchShape(requests, width)
                self._search_of(search)
                if on_progress:
                    on_progress(str(search))

    def _shape_of(self, batch: Batch) -> SearchShape | None:
        """Of the search that takes the batch; None when it fits none."""
        sizes, found = self._sizes, batch.node_filter
        requests, width = first_from(batch.num_requests, sizes.requests), first_from(batch.width, sizes.widths)
        if requests is None or width is None or requests * width > sizes.max_rows:
            return None
        if found is not None and len(found.nodes) > sizes.filter_nodes:
            return None
        return SearchShape(requests, width)

    def _recorded_tokens(self, cached: bool) -> tuple[int, ...]:
        """Sizes of recorded prefills."""
        if cached:
            return self._sizes.rest_tokens if self._searcher.attention.support.prefix else ()
        return self._sizes.tokens

    def _prefill_for(self, batch: Batch) -> RecordedPrefill | None:
        tokens = first_from(len(batch.tokens), self._tokens[batch.is_cached])
        if tokens is None:
            return None
        all_begun = batch.is_cached and self._may_be_begun(tokens) and bool(batch.numbers[1].all())
        return self._prefill_of(PrefillShape(tokens, batch.is_cached, all_begun))

    def _launch(self, batch: Batch, prefill: RecordedPrefill | None, search: RecordedSearch) -> Beams:
        self._prefill(prefill, batch)
        if search.host_plan is not None:  # now that the prefill is launched: the host works while the device does
            search.host_plan.renew(batch.prompt_lengths)
        lengths = padded(batch.prompt_lengths, search.requests)
        self._searcher.attention.refresh({"lengths": lengths})
        search.graph.update({"lengths": lengths})
        beams: Beams = search.graph.replay()
        self.num_replays += 1
        requests, width = batch.num_requests, batch.width
        return Beams(*(part[:requests, :width] for part in (beams.score, beams.node, beams.parent)))

    def _prefill(self, prefill: RecordedPrefill | None, batch: Batch) -> None:
        """Fills `self._hidden`."""
        if prefill is None:
            hidden = self._searcher.prefill(make_prompts(batch, self._backend.runtime.to_device))
            self._hidden[: len(hidden)].copy_(hidden)
            return
        if prefill.host_plan is not None:
            prefill.host_plan.renew(batch.lengths)
        prefill.graph.replay()
        self.num_replays += 1

    def _may_be_begun(self, tokens: int) -> bool:
        """Whether prefills of so many tokens are recorded for prompts that are all begun: a page of each is cached at least."""
        return tokens <= MOST_ALL_BEGUN and self._inputs.table.longest > self._inputs.table.page_size

    def _prefill_of(self, shape: PrefillShape) -> RecordedPrefill:
        if shape not in self._prefills:
            self._prefills[shape] = self._record_prefill(shape)
        return self._prefills[shape]

    def _search_of(self, shape: SearchShape) -> RecordedSearch:
        if shape not in self._searches:
            self._searches[shape] = self._record_search(shape)
        return self._searches[shape]

    def _record_prefill(self, shape: PrefillShape) -> RecordedPrefill:
        inputs, (tokens, cached, all_begun) = self._inputs, shape
        inputs.clear()
        begun = inputs.table.page_size if all_begun else 0
        length = min(tokens, inputs.table.longest - begun)  # kernels have room for no longer prompt
        inputs.cached[0], inputs.lengths[0] = begun, length
        host_plan = None if cached else self._searcher.attention.host_plan(tokens, len(inputs.lengths))
        if host_plan is not None:
            host_plan.renew(torch.tensor([length]))
        table = dataclasses.replace(inputs.table, cached=inputs.table.cached if cached else None, all_begun=all_begun)

        def run() -> None:  # the layout is made anew: what it derives from lengths belongs to the recording
            layout = PackedLayout(inputs.lengths, tokens, tokens, table=table, host_plan=host_plan)
            prompts = Prompts(inputs.token_ids(tokens), layout)
            self._hidden.copy_(self._searcher.prefill(prompts, self._backend.graph.split))

        return RecordedPrefill(self._capture(run, shape), tokens, host_plan)

    def _record_search(self, shape: SearchShape) -> RecordedSearch:
        requests, width = shape
        inputs, hidden = self._inputs, self._hidden[:requests]
        inputs.clear()
        inputs.lengths.fill_(1)
        inputs.widths.fill_(width)
        hidden.zero_()
        node_filter = inputs.node_filter(requests)
        longest = inputs.table.longest
        table = dataclasses.replace(inputs.table, pages=inputs.table.pages[:requests], cached=inputs.cached[:requests])
        host_plan = self._searcher.attention.search_host_plan(table, self._searcher.pool, width=width)
        if host_plan is not None:
            host_plan.renew(torch.ones(requests, dtype=torch.int64))

        def run() -> Beams:
            layout = PackedLayout(inputs.lengths[:requests], longest, longest, table=table, host_plan=host_plan)
            return self._searcher.search(SearchInputs(hidden, layout, inputs.widths[:requests], width, node_filter))

        return RecordedSearch(self._capture(run, shape), requests, host_plan)

    def _capture(self, run: Callable[[], Any], shape: PrefillShape | SearchShape) -> CapturedGraph:
        run.__qualname__ = str(shape)  # what a capture that fails is called
        return self._backend.graph.capture(run, self._memory_pool)


def first_from(number: int, rising: tuple[int, ...]) -> int | None:
    """The first of the rising sizes that is not below `number`."""
    place = bisect_left(rising, number)
    return rising[place] if place < len(rising) else None


def up_to(limit: int, rising: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the rising sizes that numbers up to `limit` need."""
    return rising[: bisect_left(rising, limit) + 1]


def padded(values: Tensor, places: int) -> Tensor:
    """The values with zeros behind them."""
    return torch.nn.functional.pad(values, (0, places - len(values)))
