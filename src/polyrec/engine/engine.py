"""The engine: waiting requests in, finished searches out. One thread owns it; see `engine.loop` for that thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from ..core.config import Settings
from ..core.errors import CheckpointError
from ..core.request import ScoreRule
from ..hardware.base.backend import HardwareBackend
from ..hardware.base.runtime import Event
from ..layers.head import RestrictedHead
from ..models.options import ModelOptions
from ..models.spec import Decoder
from ..sid.layout import SidLayout
from ..sid.trie import Trie
from .batching import SearchRequest, SearchResult, make_batch, split_results
from .graphs import GraphSizes
from .runner import make_runner
from .scheduler import BatchLimits, plan_batch
from .search import Searcher


class EngineConfig(Settings):
    """score_rule: DESIGN section 4. limits: how large a batch may grow. graphs: what is recorded on platforms that record;
    None: every batch is launched operation by operation. model: how the model is loaded."""

    score_rule: ScoreRule = "level"
    limits: BatchLimits = BatchLimits()
    graphs: GraphSizes | None = GraphSizes()
    model: ModelOptions = ModelOptions()


@dataclass(frozen=True)
class Waiting:
    """A request and what to call with its result."""

    request: SearchRequest
    done: Callable[[SearchResult], None]


@dataclass(frozen=True)
class InFlight:
    """A batch that the device works on. scores, nodes: host tensors [R, W], complete once `finished` is passed."""

    chosen: list[Waiting]
    scores: Tensor
    nodes: Tensor
    finished: Event


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
        self._runner = make_runner(Searcher(model, layout, trie, head, backend), backend, self._graph_sizes(model))
        # Elsewhere a second batch would only make the first one's answers wait.
        self._overlaps = backend.capabilities.async_copies
        self._waiting: deque[Waiting] = deque()
        self._in_flight: InFlight | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_replays(self) -> int:
        """Recorded graphs that were replayed."""
        return self._runner.num_replays

    def record_graphs(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Records all graphs, where the platform records them, so that no request waits for one; tells what it has done."""
        self._runner.record_all(on_progress)

    def submit(self, request: SearchRequest, done: Callable[[SearchResult], None]) -> None:
        """Queues a request; `done` is called by the `step` that finishes it."""
        self._waiting.append(Waiting(request, done))

    def step(self) -> int:
        """Launches a batch, or takes the one launched before, and answers it. Returns how many were answered; 0: none waits.

        While the device works, the host launches the next batch if that is full: one that is not may still grow.
        """
        current = self._in_flight or self._launch()
        if current is None:
            return 0
        self._in_flight = self._launch() if self._overlaps and self._next_is_full() else None
        current.finished.synchronize()
        results = split_results(
            [waiting.request for waiting in current.chosen], current.scores, current.nodes, self.trie
        )
        for waiting, result in zip(current.chosen, results, strict=True):
            waiting.done(result)
        return len(current.chosen)

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
        """Drops the requests that wait or are in flight; their `done` is never called."""
        self._waiting.clear()
        self._in_flight = None

    def _launch(self) -> InFlight | None:
        """Plan, batch, prefill and search, and the one copy to the host: all of it queued, none of it waited for."""
        chosen = self._next_batch()
        if not chosen:
            return None
        beams = self._runner.run(make_batch([waiting.request for waiting in chosen], self.trie))
        scores, _ = self._runtime.to_host_async(beams.score)
        nodes, finished = self._runtime.to_host_async(beams.node)
        return InFlight(chosen, scores, nodes, finished)

    def _graph_sizes(self, model: Decoder) -> GraphSizes | None:
        """The configured sizes within the engine's limits: the pool takes the longest batch, and any single prompt."""
        sizes, limits = self.config.graphs, self.config.limits
        if sizes is None:
            return None
        return sizes.model_copy(
            update={
                "requests": tuple(count for count in sizes.requests if count <= limits.max_requests) or (1,),
                "max_tokens": max(limits.max_tokens, model.config.max_position_embeddings),
                "max_rows": min(sizes.max_rows, limits.max_beams),
            }
        )

    def _next_batch(self) -> list[Waiting]:
        return [self._waiting.popleft() for _ in range(self._next_size())]

    def _next_is_full(self) -> bool:
        size = self._next_size()
        return size > 0 and (size < len(self._waiting) or size == self.config.limits.max_requests)

    def _next_size(self) -> int:
        queue = list(islice(self._waiting, self.config.limits.max_requests))
        return plan_batch(
            [len(waiting.request.prompt) for waiting in queue],
            [waiting.request.beam_width for waiting in queue],
            self.config.limits,
        )
