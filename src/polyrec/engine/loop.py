"""The one thread that owns the engine while a server runs: it takes requests from a bounded queue and answers futures."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from ..core.errors import RequestError
from ..core.request import Recommendation, RecommendRequest
from .batching import SearchResult
from .recommender import Prepared, Recommender

_IDLE_WAIT_S = 0.05


class EngineLoop:
    """Batches what concurrent callers ask. max_queue: how many requests may wait; one more is refused with status 429."""

    def __init__(self, recommender: Recommender, max_queue: int = 256) -> None:
        self.recommender = recommender
        self._queue: queue.Queue[tuple[Prepared, Future[Recommendation]]] = queue.Queue(max_queue)
        self._stopping = threading.Event()
        self._gate = threading.Lock()  # between a request that enters and the thread that leaves
        self._thread = threading.Thread(target=self._serve, name="polyrec-engine", daemon=True)
        self._stats = {"requests": 0, "cancelled": 0, "batches": 0, "prompt_tokens": 0, "busy_seconds": 0.0}

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
        """Counters since the start: requests, cancelled, batches, prompt_tokens, busy_seconds."""
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
            if self._stopping.is_set() or not self._thread.is_alive():
                raise RequestError("stopping", "The server is stopping.", "Ask another one.", status=503)
            try:
                self._queue.put_nowait((prepared, future))
            except queue.Full:
                raise RequestError(
                    "queue_full", f"{self._queue.maxsize} requests are waiting already.", "Try again later.", status=429
                ) from None
        return future

    def _serve(self) -> None:
        try:
            self._serve_all()
        finally:  # whoever came in until now is told; whoever comes later is refused
            with self._gate:
                self._stopping.set()
            while not self._queue.empty():
                _, future = self._queue.get_nowait()
                self._fail_unanswered([future] if future.set_running_or_notify_cancel() else [])

    def _serve_all(self) -> None:
        while not (self._stopping.is_set() and self._queue.empty()):
            waiting = self._collect()
            if not waiting:
                continue
            started = time.perf_counter()
            try:
                self._run(waiting)
            finally:  # an engine that failed stops the thread, but whoever waits is told
                self._fail_unanswered(future for _, future in waiting)
            self._stats["busy_seconds"] += time.perf_counter() - started

    def _run(self, waiting: list[tuple[Prepared, Future[Recommendation]]]) -> None:
        with self.recommender.lock:
            for prepared, future in waiting:
                self._stats["prompt_tokens"] += len(prepared.search.prompt)
                self.recommender.engine.submit(prepared.search, self._answer(prepared, future))
            try:
                while self.recommender.engine.step():
                    self._stats["batches"] += 1
            finally:  # a failed step's neighbours are told that it failed; whoever uses the engine next must not find them
                self.recommender.engine.forget_waiting()

    @staticmethod
    def _fail_unanswered(futures: Iterable[Future[Recommendation]]) -> None:
        for future in futures:
            if not future.done():
                future.set_exception(
                    RequestError("engine_failed", "The engine failed.", "See the server's log; restart it.", status=500)
                )

    def _collect(self) -> list[tuple[Prepared, Future[Recommendation]]]:
        """What waits now, up to one batch; a future that its client cancelled is left out."""
        waiting: list[tuple[Prepared, Future[Recommendation]]] = []
        limit = self.recommender.engine.config.limits.max_requests
        timeout: float | None = _IDLE_WAIT_S
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
        def done(result: SearchResult) -> None:
            self._stats["requests"] += 1
            future.set_result(self.recommender.finish(prepared, result))

        return done
