"""Runs batches through captured graphs. On the CPU a graph calls its function, so this path is the same everywhere."""

from __future__ import annotations

from ..hardware.base.backend import HardwareBackend
from ..hardware.ops.search import Beams
from .batching import Batch
from .search import Searcher


class Runner:
    """Captures the search once and replays it for each batch, which it leaves where the captured function reads it."""

    def __init__(self, searcher: Searcher, backend: HardwareBackend) -> None:
        self._searcher = searcher
        self._batch: Batch | None = None
        self._captured = backend.graph.capture(self._search)
        self.num_replays = 0

    def run(self, batch: Batch) -> Beams:
        """The finished beams of one batch, on the device."""
        self._batch = batch
        self._captured.update({"lengths": batch.lengths})
        self.num_replays += 1
        return self._captured.replay()

    def _search(self) -> Beams:
        assert self._batch is not None
        return self._searcher.search(self._batch)
