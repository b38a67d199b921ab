"""Runs batches: prefill and search, through captured graphs where the platform records them and the attention can be recorded.

On the CPU a graph calls its function, so a batch takes the same path there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..hardware.base.backend import HardwareBackend
from ..hardware.ops.search import Beams, NodeFilter
from ..hardware.table import report_never_called
from .batching import Batch
from .graphs import GraphRunner, GraphSizes
from .search import Searcher, SearchInputs, make_prompts


class Runner(Protocol):
    """num_batches, num_replays: batches run, and graphs replayed for them. num_unrecorded: batches whose search no recorded
    graph took, of a runner that records. places: numbers of requests for which searches are recorded, rising; none: a search
    has as many places as its batch has requests."""

    places: tuple[int, ...]
    num_batches: int
    num_replays: int

    @property
    def num_unrecorded(self) -> int: ...

    def run(self, batch: Batch) -> Beams:
        """The finished beams of one batch, on the device: [R, W]."""
        ...

    def rehearse(self, batch: Batch) -> None:
        """Goes through the host's part of `run` that leaves no trace."""
        ...

    def record_all(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Records whatever can be recorded before the first batch."""
        ...


def make_runner(
    searcher: Searcher, backend: HardwareBackend, sizes: GraphSizes | None, *, max_prompt: int, page_size: int
) -> Runner:
    """sizes None: without recorded graphs. max_prompt: tokens of the longest prompt."""
    direct = DirectRunner(searcher, backend)
    if sizes is None or not backend.capabilities.captures or not searcher.attention.capturable:
        return direct
    return GraphRunner(searcher, backend, sizes, direct, max_prompt=max_prompt, page_size=page_size)


class DirectRunner:
    """Shapes follow each batch. Where graphs only call, the search goes through one."""

    def __init__(self, searcher: Searcher, backend: HardwareBackend) -> None:
        self._searcher = searcher
        self._backend = backend
        self._batch: Batch | None = None
        self._captured = None if backend.capabilities.captures else backend.graph.capture(self._search)
        self.places: tuple[int, ...] = ()
        self.num_batches = 0
        self.num_replays = 0
        self.num_unrecorded = 0

    def run(self, batch: Batch) -> Beams:
        """The finished beams of one batch, on the device."""
        self._batch = batch
        if self._captured is None:
            beams = self._search()
        else:
            states = {"lengths": batch.prompt_lengths}
            self._searcher.attention.refresh(states)
            self._captured.update(states)
            beams = self._captured.replay()
            self.num_replays += 1
        self.num_batches += 1
        if self.num_batches == 1:
            report_never_called(self._backend)
        return beams

    def rehearse(self, batch: Batch) -> None:
        """Nothing: what the host does here is to launch."""

    def record_all(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Nothing is recorded."""

    def _search(self) -> Beams:
        batch, move = self._batch, self._backend.runtime.to_device
        assert batch is not None
        prompts = make_prompts(batch, move)
        hidden = self._searcher.prefill(prompts)
        found = batch.node_filter
        node_filter = None if found is None else NodeFilter(move(found.nodes), move(found.ends), move(found.allow))
        return self._searcher.search(SearchInputs(hidden, prompts.layout, move(batch.widths), batch.width, node_filter))
