"""The one thread that owns the engine while a server runs: it takes requests from a bounded queue and answers futures."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from ..core.awake import ANSWER_S, stay_awake
from ..core.errors import PolyrecError, RequestError
from ..core.request import Recommendation, RecommendRequest
from .front import Prepared
from .recommender import Recommender
from .searches import SearchRequest, SearchResult

_IDLE_WAIT_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A search in the queue. deadline: `time.monotonic` seconds, or None."""

    search: SearchRequest
    future: Future[Any]
    deadline: float | None


class Outside(Protocol):
    """Who brings searches from outside the process. All but `wake` is called by the loop's own thread."""

    @property
    def stays_awake(self) -> bool:
        """Whether the thread may keep a core busy while the device works for one request only."""
        ...

    def wait(self, seconds: float, is_work_here: Callable[[], bool], after_lone: Callable[[], None] | None) -> None:
        """Queues what comes until there is work, or for `seconds`. after_lone: not None where the last batch was one request;
        called once, if the thread stays awake then, before it looks."""

    def leave(self) -> None:
        """The thread has something to do, or ends: until it waits again, others must look for what comes."""

    def wake(self) -> None:
        """There is work: ends a `wait`. From any thread."""

    def answered(self) -> None:
        """All futures of a batch are done."""

    def rehearse(self, search: SearchRequest, result: SearchResult) -> None:
        """What it does with a search that comes and a result that goes, without either."""


class EngineLoop:
    """Batches what concurrent callers ask. max_queue: how many requests may wait; one more is refused with status 429."""

    def __init__(self, recommender: Recommender, max_queue: int = 256) -> None:
        self.recommender = recommender
        self._max_queue = max_queue
        self._queue: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._rehearsed: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._gate = threading.Lock()  # between a request that enters and the thread that leaves
        self._outside: Outside | None = None
        self._was_alone = False
        self._thread = threading.Thread(target=self._serve, name="polyrec-engine", daemon=True)
        self._stats: dict[str, float] = dict.fromkeys(
            ("requests", "cancelled", "expired", "batches", "replays", "unrecorded"), 0
        )
        self._stats["busy_seconds"] = 0.0
        self._stats.update(self._memory_stats())

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def depth(self) -> int:
        """Requests that wait."""
        return self._queue.qsize()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still serves."""
        return self._thread.is_alive()

    @property
    def stats(self) -> dict[str, float]:
        """Counters since the start: requests, cancelled, expired, batches, replays (of graphs), unrecorded (batches),
        busy_seconds, and the prefix cache's own; the bytes of graphs; and how many pages are free, kept, used and on the host
        after the last batch."""
        return dict(self._stats)

    def attend(self, outside: Outside | None) -> None:
        """From now on its thread waits for searches there, while it idles; None: in its own queue."""
        self._outside = outside

    def search(self, search: SearchRequest, deadline: float | None = None) -> Future[SearchResult]:
        """Queues a search. deadline: `time.monotonic` seconds; who still waits then gets RequestError `deadline_exceeded`.
        Errors: RequestError `queue_full`, `stopping`."""
        future: Future[SearchResult] = Future()
        self._enqueue(Asked(search, future, deadline))
        return future

    def submit(self, request: RecommendRequest) -> Future[Recommendation]:
        """Queues a request; its prompt is built in the caller's thread, its answer in the thread that asks for the result.
        Errors: RequestError, `queue_full` among them."""
        prepared = self.recommender.prepare(request)
        if isinstance(prepared, Recommendation):
            future: Future[Recommendation] = Future()
            future.set_result(prepared)
            return future
        return self._submit(prepared)

    def submit_prompt(self, token_ids: Sequence[int], n: int, beam_width: int | None = None) -> Future[Recommendation]:
        """Queues a search from a ready prompt."""
        return self._submit(self.recommender.prepare_prompt(token_ids, n, beam_width))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in the engine's thread, before its next batch. Error: `stopping` (503)."""
        future: Future[T] = Future()
        with self._gate:
            self._refuse_stopped()
            self._calls.put((function, future))
        self._wake()
        return future

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no more requests, serves those that wait, and stops the thread; False when it is not done in time."""
        with self._gate:
            self._stopping.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _submit(self, prepared: Prepared) -> Future[Recommendation]:
        future = _Unfinished(self.recommender, prepared)
        self._enqueue(Asked(prepared.search, future, None))
        return future

    def _enqueue(self, asked: Asked) -> None:
        with self._gate:
            self._refuse_stopped()
            if self._queue.qsize() >= self._max_queue:
                raise RequestError(
                    "queue_full", f"{self._max_queue} requests are waiting already.", "Try again later.", status=429
                )
            self._queue.put(asked)
        self._wake()

    def _wake(self) -> None:
        if (outside := self._outside) is not None:
            outside.wake()

    def _leave(self) -> None:
        if (outside := self._outside) is not None:
            outside.leave()

    def _refuse_stopped(self) -> None:
        if self._stopping.is_set() or not self._thread.is_alive():
            raise RequestError("stopping", "The server is stopping.", "Ask another one.", status=503)

    def _serve(self) -> None:
        try:
            self._serve_all()
        finally:  # whoever came in until now is told; whoever comes later is refused
            with self._gate:
                self._stopping.set()
            self._leave()
            while not self._queue.empty():
                future = self._queue.get_nowait().future
                self._fail_unanswered([future] if future.set_running_or_notify_cancel() else [])
            while not self._calls.empty():
                _, future = self._calls.get_nowait()
                self._fail_unanswered([future] if future.set_running_or_notify_cancel() else [])

    def _serve_all(self) -> None:
        while not (self._stopping.is_set() and self._queue.empty() and self._calls.empty()):
            self._run_calls()
            if waiting := self._await_some():
                self._run(waiting)

    def _await_some(self) -> list[Asked]:
        """Who waits, or comes soon."""
        if (outside := self._outside) is None:
            return self._collect(_IDLE_WAIT_S)
        if self._queue.empty():
            after_lone = partial(self._rehearse, outside) if self._was_alone else None
            self._was_alone = False
            outside.wait(_IDLE_WAIT_S, self._is_work_here, after_lone)
        return self._collect(None)

    def _is_work_here(self) -> bool:
        return not self._queue.empty() or not self._calls.empty() or self._stopping.is_set()

    def _run(self, waiting: list[Asked]) -> None:
        """Until nobody waits: gives the engine who is here, runs a batch, takes who came meanwhile."""
        engine, unanswered = self.recommender.engine, set[Future[Any]]()
        self._leave()

        def submit(some: list[Asked]) -> None:
            unanswered.update(asked.future for asked in some)
            for asked in some:
                engine.submit(asked.search, self._answer(asked.future), asked.deadline)

        def intake(seconds: float) -> None:
            awake = ANSWER_S - (time.perf_counter() - started)
            if len(unanswered) == 1 and awake > 0 and (outside := self._outside) is not None and outside.stays_awake:
                until = time.perf_counter() + min(seconds, awake)
                self._rehearse(outside)
                stay_awake(until - time.perf_counter(), lambda: engine.is_done or not self._queue.empty())
                submit(self._collect(None))
            else:
                submit(self._collect(seconds))

        with self.recommender.lock:
            try:
                while waiting or unanswered:
                    self._run_calls()
                    started = time.perf_counter()
                    submit(waiting)
                    if num_answered := engine.step(intake):
                        self._stats["batches"] += 1
                        self._was_alone = num_answered == 1
                        if (outside := self._outside) is not None:
                            outside.answered()
                    unanswered = {future for future in unanswered if not future.done()}
                    self._stats["replays"], self._stats["unrecorded"] = engine.num_replays, engine.num_unrecorded
                    self._stats.update(self._memory_stats())
                    self._stats["busy_seconds"] += time.perf_counter() - started
                    waiting = self._collect(None)
            finally:  # an engine that failed stops the thread, but whoever waits is told; the next user must not find them
                engine.forget_waiting()
                self._fail_unanswered(unanswered)

    def _rehearse(self, outside: Outside) -> None:
        """`Engine.rehearse`, and this thread's own work around it."""
        for search, result in self.recommender.engine.rehearse():
            outside.rehearse(search, result)
            future: Future[Any] = Future()
            self._rehearsed.put(Asked(search, future, None))
            self._rehearsed.get().future.set_running_or_notify_cancel()
            future.add_done_callback(_nothing)
            future.set_result(result)

    def _memory_stats(self) -> dict[str, float]:
        engine = self.recommender.engine
        prefixes = engine.memory.prefixes
        return {
            **dataclasses.asdict(prefixes.stats),
            "graph_bytes": engine.graph_bytes,
            "free_pages": prefixes.num_free,
            "kept_pages": prefixes.num_evictable,
            "used_pages": prefixes.num_used,
            "host_pages": prefixes.num_on_host,
        }

    def _run_calls(self) -> None:
        while not self._calls.empty():
            self._leave()
            function, future = self._calls.get_nowait()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except PolyrecError as error:
                future.set_exception(error)
            except BaseException:  # whoever waits is told, and the error goes on: it ends the thread
                self._fail_unanswered([future])
                raise

    @staticmethod
    def _fail_unanswered(futures: Iterable[Future[Any]]) -> None:
        for future in futures:
            if not future.done():
                future.set_exception(
                    RequestError("engine_failed", "The engine failed.", "See the server's log; restart it.", status=500)
                )

    def _collect(self, timeout: float | None) -> list[Asked]:
        """What waits now, up to two batches (one to run, one to be launched meanwhile); cancelled futures are left out.

        timeout: seconds to wait for the first; None: do not wait.
        """
        waiting: list[Asked] = []
        limit = 2 * self.recommender.engine.config.limits.max_requests - self.recommender.engine.num_waiting
        if limit <= 0 and timeout:
            time.sleep(timeout)
        while len(waiting) < limit and not (timeout is None and self._queue.empty()):
            try:
                asked = self._queue.get(block=timeout is not None, timeout=timeout)
            except queue.Empty:
                break
            timeout = None  # only the first may be waited for
            if asked.future.set_running_or_notify_cancel():
                waiting.append(asked)
            else:
                self._stats["cancelled"] += 1
        return waiting

    def _answer(self, future: Future[Any]) -> Callable[[SearchResult | None], None]:
        def done(result: SearchResult | None) -> None:
            if result is None:
                self._stats["expired"] += 1
                future.set_exception(_expired())
            else:
                self._stats["requests"] += 1
                future.set_result(result)

        return done


class _Unfinished(Future[Recommendation]):
    """The engine's thread sets what it found and goes on; names and texts are looked up by the thread that takes the result."""

    def __init__(self, recommender: Recommender, prepared: Prepared) -> None:
        super().__init__()
        self._recommender, self._prepared = recommender, prepared

    def result(self, timeout: float | None = None) -> Recommendation:
        found: Any = super().result(timeout)
        return self._recommender.finish(self._prepared, found)


def _nothing(future: Future[Any]) -> None:
    """What a rehearsal's future calls."""


def _expired() -> RequestError:
    return RequestError(
        "deadline_exceeded",
        "The request's time was over before the engine came to it.",
        "Send fewer requests at a time, or raise timeout_ms, where it was sent, or --timeout.",
        status=504,
    )
