"""The one thread that owns the engine while a server runs: it takes requests from a bounded queue and answers futures."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ..core.errors import PolyrecError, RequestError
from ..core.request import Recommendation, RecommendRequest
from .batching import SearchResult
from .recommender import Prepared, Recommender

_IDLE_WAIT_S = 0.05
Asked = tuple[Prepared, Future[Recommendation]]
T = TypeVar("T")


class EngineLoop:
    """Batches what concurrent callers ask. max_queue: how many requests may wait; one more is refused with status 429."""

    def __init__(self, recommender: Recommender, max_queue: int = 256) -> None:
        self.recommender = recommender
        self._queue: queue.Queue[Asked] = queue.Queue(max_queue)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._gate = threading.Lock()  # between a request that enters and the thread that leaves
        self._thread = threading.Thread(target=self._serve, name="polyrec-engine", daemon=True)
        self._stats: dict[str, float] = dict.fromkeys(
            ("requests", "cancelled", "batches", "replays", "prompt_tokens"), 0
        )
        self._stats["busy_seconds"] = 0.0

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
        """Counters since the start: requests, cancelled, batches, replays (of recorded graphs), prompt_tokens, busy_seconds."""
        return dict(self._stats)

    def submit(self, request: RecommendRequest) -> Future[Recommendation]:
        """Queues a request; its prompt is built in the caller's thread. Errors: RequestError, `queue_full` among them."""
        prepared = self.recommender.prepare(request)
        if isinstance(prepared, Recommendation):
            future: Future[Recommendation] = Future()
            future.set_result(prepared)
            return future
        return self._enqueue(prepared)

    def submit_prompt(self, token_ids: Sequence[int], n: int, beam_width: int | None = None) -> Future[Recommendation]:
        """Queues a search from a ready prompt."""
        return self._enqueue(self.recommender.prepare_prompt(token_ids, n, beam_width))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in the engine's thread, before its next batch. Error: `stopping` (503)."""
        future: Future[T] = Future()
        with self._gate:
            self._refuse_stopped()
            self._calls.put((function, future))
        return future

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no more requests, serves those that wait, and stops the thread; False when it is not done in time."""
        with self._gate:
            self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _enqueue(self, prepared: Prepared) -> Future[Recommendation]:
        future: Future[Recommendation] = Future()
        with self._gate:
            self._refuse_stopped()
            try:
                self._queue.put_nowait((prepared, future))
            except queue.Full:
                raise RequestError(
                    "queue_full", f"{self._queue.maxsize} requests are waiting already.", "Try again later.", status=429
                ) from None
        return future

    def _refuse_stopped(self) -> None:
        if self._stopping.is_set() or not self._thread.is_alive():
            raise RequestError("stopping", "The server is stopping.", "Ask another one.", status=503)

    def _serve(self) -> None:
        try:
            self._serve_all()
        finally:  # whoever came in until now is told; whoever comes later is refused
            with self._gate:
                self._stopping.set()
            while not self._queue.empty():
                _, future = self._queue.get_nowait()
                self._fail_unanswered([future] if future.set_running_or_notify_cancel() else [])
            while not self._calls.empty():
                _, future = self._calls.get_nowait()
                self._fail_unanswered([future] if future.set_running_or_notify_cancel() else [])

    def _serve_all(self) -> None:
        while not (self._stopping.is_set() and self._queue.empty() and self._calls.empty()):
            self._run_calls()
            if waiting := self._collect(_IDLE_WAIT_S):
                self._run(waiting)

    def _run(self, waiting: list[Asked]) -> None:
        """Until nobody waits: gives the engine who is here, runs a batch, takes who came meanwhile."""
        engine, asked = self.recommender.engine, set[Future[Recommendation]]()
        with self.recommender.lock:
            try:
                while waiting or asked:
                    self._run_calls()
                    started = time.perf_counter()
                    for prepared, future in waiting:
                        self._stats["prompt_tokens"] += len(prepared.search.prompt)
                        asked.add(future)
                        engine.submit(prepared.search, self._answer(prepared, future))
                    if engine.step():
                        self._stats["batches"] += 1
                    asked = {future for future in asked if not future.done()}
                    self._stats["replays"] = engine.num_replays
                    self._stats["busy_seconds"] += time.perf_counter() - started
                    waiting = self._collect(None)
            finally:  # an engine that failed stops the thread, but whoever waits is told; the next user must not find them
                engine.forget_waiting()
                self._fail_unanswered(asked)

    def _run_calls(self) -> None:
        while not self._calls.empty():
            function, future = self._calls.get_nowait()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except PolyrecError as error:
                future.set_exception(error)
            except BaseException:
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
        while len(waiting) < limit:
            try:
                prepared, future = self._queue.get(block=timeout is not None, timeout=timeout)
            except queue.Empty:
                break
            timeout = None  # only the first may be waited for
            if future.set_running_or_notify_cancel():
                waiting.append((prepared, future))
            else:
                self._stats["cancelled"] += 1
        return waiting

    def _answer(self, prepared: Prepared, future: Future[Recommendation]) -> Callable[[SearchResult], None]:
        def done(result: SearchResult | None) -> None:
            assert result is not None, "no request was given a deadline"
            self._stats["requests"] += 1
            future.set_result(self.recommender.finish(prepared, result))

        return done
