"""The engine: waiting requests in, finished searches out. One thread owns it; see `engine.loop` for that thread."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from torch import Tensor

from ..core.config import Settings
from ..core.errors import CheckpointError, HardwareError
from ..core.request import ScoreRule
from ..hardware.base.backend import HardwareBackend
from ..hardware.base.runtime import Event
from ..kvcache.options import KVConfig
from ..kvcache.prefix import Held
from ..layers.head import RestrictedHead
from ..models.options import ModelOptions
from ..models.spec import Decoder
from ..sid.layout import SidLayout
from ..sid.trie import Trie
from .batching import make_batch, split_results
from .graphs import GraphSizes, up_to
from .memory import PromptMemory
from .pace import Pace
from .runner import make_runner
from .scheduler import BatchLimits, Candidate, choose_batch, first_part, recorded_part
from .search import Searcher
from .searches import SearchRequest, SearchResult

Done = Callable[[SearchResult | None], None]
LOOK_SECONDS = 1e-3  # between two looks at whether the device is done, while requests are waited for


class EngineConfig(Settings):
    """score_rule: DESIGN section 4. limits: how large a batch may grow. graphs: what is recorded on platforms that record;
    None: every batch is launched operation by operation. model: how the model is loaded. kv: keys and values of prompts."""

    score_rule: ScoreRule = "level"
    limits: BatchLimits = BatchLimits()
    graphs: GraphSizes | None = GraphSizes()
    model: ModelOptions = ModelOptions()
    kv: KVConfig = KVConfig()


@dataclass(frozen=True)
class Waiting:
    """A request, what to call with its result, and how much of its prompt was cached when it came. since, deadline:
    `time.monotonic` seconds."""

    request: SearchRequest
    done: Done
    num_cached: int
    since: float
    deadline: float | None


@dataclass(frozen=True)
class InFlight:
    """A batch that the device works on. held: its prompts' pages. scores, nodes: host tensors [R, W], complete once `finished`
    is passed. rows: through the model. launched: `time.monotonic` seconds."""

    rows: int
    launched: float
    chosen: list[Waiting]
    held: list[Held]
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
        needs = model.attention_needs(model.head_weight.dtype)
        if not backend.capabilities.fp8:  # then e4m3 is told by operations in other dtypes, and kernels know none of it
            needs = replace(needs, quantized=False)
        attention = backend.attention.build(needs, backend.ops)
        self._launched_attention = None
        if config.graphs is not None and backend.capabilities.captures and not attention.capturable:
            self._launched_attention = backend.attention.select(needs)
        self.graph_bytes = 0
        self.memory = PromptMemory(
            model, attention, backend, config.kv, depth=layout.depth, batch_tokens=config.limits.max_tokens
        )
        self._runner = make_runner(
            Searcher(model, layout, trie, head, attention, self.memory.pool, backend),
            backend,
            self._graph_sizes(),
            max_prompt=self.memory.max_prompt,
            page_size=self.memory.size.page_size,
        )
        # Elsewhere a second batch would only make the first one's answers wait.
        self._overlaps = backend.capabilities.async_copies
        self._pace = Pace()
        self._waiting: list[Waiting] = []
        self._in_flight: InFlight | None = None
        self._awaited: InFlight | None = None  # whose end `step` waits for
        self._answered: InFlight | None = None  # the last, once it is answered

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_replays(self) -> int:
        """Recorded graphs that were replayed."""
        return self._runner.num_replays

    @property
    def num_unrecorded(self) -> int:
        """Batches whose search no recorded graph took, where others are recorded."""
        return self._runner.num_unrecorded

    def record_graphs(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Records all graphs, where the platform records them, so that no request waits for one; tells what it has done.
        `graph_bytes` is then the device memory that they took. Errors: `attention_not_recorded`, and those of `Graph.capture`.
        """
        if self._launched_attention is not None:
            raise HardwareError(
                "attention_not_recorded",
                f"The platform records graphs, and attention '{self._launched_attention}' cannot be recorded: the host would"
                " launch each operation of each batch.",
                "Choose another one with --attention, or run without graphs (--eager).",
            )
        before, recorded = self._runtime.memory().free, list[str]()

        def tell(what: str) -> None:
            recorded.append(what)
            if on_progress:
                on_progress(what)

        self._runner.record_all(tell)
        # Where nothing is recorded, what is free differs all the same: it is the host's memory, which others use too.
        self.graph_bytes = max(before - self._runtime.memory().free, 0) if recorded else 0

    def submit(self, request: SearchRequest, done: Done, deadline: float | None = None) -> None:
        """Queues a request; `done` is called by the `step` that finishes it.

        deadline: `time.monotonic` seconds. Where the request still waits then, it is not run, and `done` gets None.
        """
        # The front refuses longer ones; here they would wait for pages that there are not.
        assert len(request.prompt) <= self.memory.max_prompt, "a prompt that no batch can take"
        num_cached = self.memory.prefixes.peek(request.prompt)
        self._waiting.append(Waiting(request, done, num_cached, time.monotonic(), deadline))

    def step(self, intake: Callable[[float], None] | None = None) -> int:
        """Launches a batch, or takes the one launched before, and answers it. Returns how many were answered; 0: none waits.

        While the device works, the host launches the next batch: at once if that is full, else as late as the device allows,
        since it may still grow. intake: waits for requests, for so many seconds at most, and submits those that came; None:
        nobody comes before this returns.
        """
        self._runtime.enter_thread()  # whichever calls: kernels of Triton's are launched on the thread's device
        self._drop_expired()
        current, self._in_flight, split = self._in_flight, None, False
        if current is None:
            chosen = self._recorded_part(self._choose())
            first = chosen if intake is None or not self._overlaps else self._first_part(chosen)
            current, split = self._launch(first), len(first) < len(chosen)
        if current is None:
            return 0
        try:
            self._awaited = current
            if self._overlaps:
                self._launch_behind(current, intake, at_once=split)
            current.finished.synchronize()
            self._pace.finished(current.rows, len(current.chosen), current.launched, time.monotonic())
            results = split_results(
                [waiting.request for waiting in current.chosen], current.scores, current.nodes, self.trie
            )
        finally:  # also after a fault or Ctrl-C: whoever uses the engine next finds all pages
            self._awaited = None
            self._release(current.held)
        for waiting, result in zip(current.chosen, results, strict=True):
            waiting.done(result)
        self._answered = current
        return len(current.chosen)

    @property
    def is_done(self) -> bool:
        """Whether nothing is waited for, or what is waited for is done."""
        current = self._awaited
        return current is None or current.finished.query()

    def rehearse(self) -> list[tuple[SearchRequest, SearchResult]]:
        """For a thread that neither sleeps nor has anything to do: goes through the host's work on what `step` waits for, or on
        what it answered last, once more, and leaves no trace. A core that waits for some milliseconds forgets code and tables,
        and does what comes next, the answer and another request, at half its pace or less. Filters, which take longer, are not
        gone through.

        Returns those requests, each with a result of its size, whose values are whatever they are by now."""
        current = self._awaited or self._answered
        if current is None:
            return []
        asked, now = [waiting.request for waiting in current.chosen], time.monotonic()
        if any(request.excluded is not None or request.allowed is not None for request in asked):
            return []
        for request in asked:
            self.memory.prefixes.peek(request.prompt)
        choose_batch([self._candidate(waiting, now) for waiting in current.chosen], self.config.limits, 0)
        self._runner.rehearse(make_batch(asked, current.held, self.memory.size.page_size, self.trie))
        return list(zip(asked, split_results(asked, current.scores, current.nodes, self.trie), strict=True))

    def run(
        self, requests: Sequence[SearchRequest], on_progress: Callable[[int], None] | None = None
    ) -> list[SearchResult]:
        """Serves all requests, in batches of similar length, and returns the results in the order given."""
        results: dict[int, SearchResult | None] = {}
        order = iter(sorted(range(len(requests)), key=lambda index: len(requests[index].prompt)))
        try:
            while True:
                self._feed(order, requests, results)
                served = self.step()
                if not served:
                    break
                if on_progress:
                    on_progress(served)
        finally:  # after a fault or Ctrl-C the next caller must not serve what nobody waits for
            self.forget_waiting()
        return [result for index in range(len(requests)) if (result := results[index]) is not None]

    def forget_waiting(self) -> None:
        """Drops the requests that wait or are in flight; their `done` is never called."""
        self._waiting.clear()
        if self._in_flight is not None:
            self._release(self._in_flight.held)
        self._in_flight = None

    def _feed(
        self, order: Iterator[int], requests: Sequence[SearchRequest], results: dict[int, SearchResult | None]
    ) -> None:
        """Keeps two batches' worth waiting: planning looks at all that wait."""
        for index in islice(order, 2 * self.config.limits.max_requests - len(self._waiting)):
            self.submit(requests[index], functools.partial(results.__setitem__, index))

    def _drop_expired(self) -> None:
        now, waiting = time.monotonic(), self._waiting
        self._waiting = [each for each in waiting if each.deadline is None or each.deadline >= now]
        for each in waiting:
            if each.deadline is not None and each.deadline < now:
                each.done(None)

    def _choose(self) -> list[int]:
        """Which of those that wait may make the next batch."""
        now, prefixes = time.monotonic(), self.memory.prefixes
        candidates = [self._candidate(waiting, now) for waiting in self._waiting]
        return choose_batch(candidates, self.config.limits, prefixes.num_free + prefixes.num_evictable)

    def _candidate(self, waiting: Waiting, now: float) -> Candidate:
        num_tokens = len(waiting.request.prompt) - waiting.num_cached
        num_pages = self.memory.prefixes.num_pages_needed(num_tokens)
        return Candidate(num_tokens, waiting.request.beam_width, num_pages, now - waiting.since)

    def _recorded_part(self, chosen: list[int]) -> list[int]:
        """Those of the chosen that go now, so that few rows of recorded searches are nobody's."""
        places, filling_rows = self._runner.places, self.config.limits.filling_rows
        if len(chosen) <= 1 or not places:
            return chosen
        candidates = [self._candidate(self._waiting[index], 0.0) for index in chosen]
        return chosen[: recorded_part(candidates, places, self.trie.depth - 1, filling_rows)]

    def _first_part(self, chosen: list[int]) -> list[int]:
        """Those that go first where the device idles and the others may be launched behind them."""
        passes = self.trie.depth - 1
        asked = [self._waiting[index] for index in chosen]
        rows = [len(each.request.prompt) - each.num_cached + passes * each.request.beam_width for each in asked]
        return chosen[: first_part(rows, self.config.limits.filling_rows)]

    def _launch_behind(self, current: InFlight, intake: Callable[[float], None] | None, *, at_once: bool) -> None:
        """Launches the batch after the current one, if there is any to launch before that ends. at_once: it waits already,
        split from the current one."""
        due = self._pace.due(current.rows, len(current.chosen), current.launched)
        at_once = intake is None or (at_once and due is None)
        while True:
            chosen = self._choose()
            full = 0 < len(chosen) < len(self._waiting) or len(chosen) == self.config.limits.max_requests
            is_time = due is not None and time.monotonic() >= due
            if chosen and (full or is_time or at_once):
                self._in_flight = self._launch(self._recorded_part(chosen))
                return
            # A time that is told too late must not keep anyone waiting.
            if is_time or due is None or intake is None or current.finished.query():
                return
            intake(min(max(due - time.monotonic(), 0.0), LOOK_SECONDS))
            self._drop_expired()

    def _launch(self, indices: list[int]) -> InFlight | None:
        """Admission, batch, prefill and search, and the one copy to the host: all of it queued, none of it waited for."""
        started = time.monotonic()
        chosen, held = self._admit(indices)
        if not chosen:
            return None
        try:
            requests = [waiting.request for waiting in chosen]
            batch = make_batch(requests, held, self.memory.size.page_size, self.trie)
            beams = self._runner.run(batch)
            scores, _ = self._runtime.to_host_async(beams.score)
            nodes, finished = self._runtime.to_host_async(beams.node)
        except BaseException:  # also Ctrl-C: whoever uses the engine next finds all pages
            self._release(held)
            raise
        for waiting, each in zip(chosen, held, strict=True):
            self.memory.prefixes.keep(each, waiting.request.prompt)
        self.memory.make_room()
        now = time.monotonic()
        self._pace.launched(now - started)
        rows = len(batch.tokens) + (self.trie.depth - 1) * int(batch.numbers[2].sum())
        return InFlight(rows, now, chosen, held, scores, nodes, finished)

    def _admit(self, indices: list[int]) -> tuple[list[Waiting], list[Held]]:
        """Takes the chosen from the queue, each with its pages. Where a prefix has left the cache since the request came, pages
        may be short: that request waits on."""
        chosen, held, taken = [], [], set[int]()
        for index in indices:
            each = self.memory.prefixes.admit(self._waiting[index].request.prompt)
            if each is not None:
                chosen.append(self._waiting[index])
                held.append(each)
                taken.add(index)
        self._waiting = [waiting for index, waiting in enumerate(self._waiting) if index not in taken]
        return chosen, held

    def _release(self, held: Iterable[Held]) -> None:
        for each in held:
            self.memory.prefixes.release(each)

    def _graph_sizes(self) -> GraphSizes | None:
        """The configured sizes within the engine's limits."""
        sizes, limits = self.config.graphs, self.config.limits
        if sizes is None:
            return None
        return sizes.model_copy(
            update={
                "requests": tuple(count for count in sizes.requests if count <= limits.max_requests) or (1,),
                "tokens": up_to(limits.max_tokens, sizes.tokens),
                "rest_tokens": up_to(limits.max_tokens, sizes.rest_tokens),
                "max_rows": min(sizes.max_rows, limits.max_beams),
            }
        )
