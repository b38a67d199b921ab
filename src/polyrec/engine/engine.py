"""The engine: waiting requests in, finished searches out. One thread owns it; see `engine.loop` for that thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from ..core.config import Settings
from ..core.errors import CheckpointError
from ..core.request import ScoreRule
from ..hardware.base.backend import HardwareBackend
from ..layers.head import RestrictedHead
from ..models.spec import Decoder
from ..sid.layout import SidLayout
from ..sid.trie import Trie
from .batching import SearchRequest, SearchResult, make_batch, split_results
from .runner import Runner
from .scheduler import BatchLimits, plan_batch
from .search import Searcher


class EngineConfig(Settings):
    """score_rule: DESIGN section 4. limits: how large a batch may grow."""

    score_rule: ScoreRule = "level"
    limits: BatchLimits = BatchLimits()


@dataclass(frozen=True)
class Waiting:
    """A request and what to call with its result."""

    request: SearchRequest
    done: Callable[[SearchResult], None]


class Engine:
    """Searches a trie with a model. Not thread-safe: its owner alone calls it."""

    def __init__(
        self, model: Decoder, layout: SidLayout, trie: Trie, backend: HardwareBackend, config: EngineConfig
    ) -> None:
        if layout.depth != trie.depth:
            raise CheckpointError(
                "depth_differs",
                f"The model's SIDs have {layout.depth} levels, the catalog's {trie.depth}.",
                "Use the catalog that belongs to the model.",
            )
        self.trie = trie
        self.config = config
        self._runtime = backend.runtime
        rows = tuple(
            (start, start + size) for start, size in zip(layout.level_starts, layout.codebook_sizes, strict=True)
        )
        head = RestrictedHead(model.head_weight.detach(), rows, config.score_rule, backend.ops)
        self._runner = Runner(Searcher(model, layout, trie, head, backend), backend)
        self._waiting: deque[Waiting] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: SearchRequest, done: Callable[[SearchResult], None]) -> None:
        """Queues a request; `done` is called by the `step` that finishes it."""
        self._waiting.append(Waiting(request, done))

    def step(self) -> int:
        """Serves one batch: plan, batch, search, one copy to the host, answers. Returns how many were served."""
        chosen = self._next_batch()
        if not chosen:
            return 0
        requests = [waiting.request for waiting in chosen]
        batch = make_batch(requests, self.trie, self._runtime)
        beams = self._runner.run(batch)
        scores, nodes = self._runtime.to_host(beams.score), self._runtime.to_host(beams.node)
        for waiting, result in zip(chosen, split_results(requests, scores, nodes, self.trie), strict=True):
            waiting.done(result)
        return len(chosen)

    def run(
        self, requests: Sequence[SearchRequest], on_progress: Callable[[int], None] | None = None
    ) -> list[SearchResult]:
        """Serves all requests, in batches of similar length, and returns the results in the order given."""
        results: dict[int, SearchResult] = {}
        for index in sorted(range(len(requests)), key=lambda index: len(requests[index].prompt)):
            self.submit(requests[index], lambda result, index=index: results.__setitem__(index, result))  # type: ignore[misc]
        try:
            while served := self.step():
                if on_progress:
                    on_progress(served)
        finally:  # after a fault or Ctrl-C the next caller must not serve what nobody waits for
            self.forget_waiting()
        return [results[index] for index in range(len(requests))]

    def forget_waiting(self) -> None:
        """Drops the requests that wait; their `done` is never called."""
        self._waiting.clear()

    def _next_batch(self) -> list[Waiting]:
        queue = list(islice(self._waiting, self.config.limits.max_requests))
        size = plan_batch(
            [len(waiting.request.prompt) for waiting in queue],
            [waiting.request.beam_width for waiting in queue],
            self.config.limits,
        )
        return [self._waiting.popleft() for _ in range(size)]
