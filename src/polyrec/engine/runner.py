"""Runs batches through captured graphs. On the CPU a graph calls its function, so this path is the same everywhere."""

from __future__ import annotations

from ..hardware.base.backend import HardwareBackend
from ..hardware.ops.search import Beams
from ..hardware.table import report_never_called
from .batching import Batch
from .search import Searcher


class Runner:
    """Captures the search once and replays it for each batch, which it leaves where the captured function reads it."""

    def __init__(self, searcher: Searcher, backend: HardwareBackend) -> None:
        self._searcher = searcher
        self._backend = backend
        self._batch: Batch | None = None
        # The search allocates and takes its shapes from each batch, which a recording cannot follow: where graphs record,
        # it is called directly.
        self._captured = None if backend.capabilities.captures else backend.graph.capture(self._search)
        self.num_replays = 0

    def run(self, batch: Batch) -> Beams:
        """The finished beams of one batch, on the device."""
        self._batch = batch
        beams = self._replay(batch)
        self.num_replays += 1
        if self.num_replays == 1:
            report_never_called(self._backend)
        return beams

    def _replay(self, batch: Batch) -> Beams:
        if self._captured is None:
            return self._search()
        states = {"lengths": batch.lengths}
        self._searcher.attention.refresh(states)
        self._captured.update(states)
        return self._captured.replay()

    def _search(self) -> Beams:
        assert self._batch is not None
        return self._searcher.search(self._batch)
