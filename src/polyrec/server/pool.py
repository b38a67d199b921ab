"""The engine's process and its HTTP workers: starts them, carries their searches to the engine's loop, ends with them.

All of it runs in the event loop of the main thread, but what searches need: that may run in the engine's thread as well. A
worker that ends by itself is replaced: the listening socket is open here too, so connections wait for the next one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import signal
import socket
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from prometheus_client import Metric

from ..core.errors import PolyrecError
from ..engine.searches import SearchRequest, SearchResult
from .channel import (
    Answers,
    Ask,
    AskMetrics,
    Cancel,
    Channel,
    Count,
    Counted,
    Drain,
    Facts,
    Failed,
    Loaded,
    Open,
    Profile,
    Status,
    rehearse,
)
from .lines import HAS_LINES, Line, Lines
from .logs import FIELDS, LOGGER
from .profile import Profile as OwnProfile
from .state import DRAINING, READY, ServerState, Service
from .worker import WorkerStart, run_worker

_WATCH_S = 0.05  # between two looks at the loading stage and at the engine's thread
_RETRY_S = 1.0  # before a worker is started for one that ended as it replaced another
_COUNT_S = 2.0  # what a worker that does not answer counted before is shown
_FEW = 4  # answers
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Peer:
    """A worker as the engine's process sees it. counted: the last it told; asked: what it waits for."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None
        self.channel: Channel | Line | None = None
        self.loaded = False
        self.has_facts = False
        self.error: Exception | None = None
        self.counted: list[Metric] = []
        self.asked: dict[int, Future[Any]] = {}

    def send(self, message: Any) -> None:
        if (channel := self.channel) is not None:  # looked at once: another thread may take it away
            channel.send(message)


Done = Callable[[Peer, int, "Future[Any]"], None]


class WorkerPool:
    """Serves `listener` by `num` workers, until a signal. on_stage is called with "loading" when probes are answered, and with
    "ready" when requests are."""

    def __init__(
        self, num: int, start: WorkerStart, listener: socket.socket, state: ServerState, on_stage: Callable[[str], None]
    ) -> None:
        self._num, self._start, self._listener, self._state, self._on_stage = num, start, listener, state, on_stage
        self._untold = deque(["loading", "ready"])
        self._logger = logging.getLogger(LOGGER)
        self._peers: list[Peer] = []
        self._service: Service | None = None
        self._last: Status | None = None
        self._lines: Lines | None = None
        self._done_searches: deque[tuple[Peer, int, Future[Any]]] = deque()
        self._sending = threading.Lock()
        self._is_called = False
        self._engine_thread: int | None = None
        self._counts: dict[int, tuple[Peer, int, set[Peer]]] = {}
        self._replacing: set[asyncio.Future[None]] = set()  # a loop keeps none of its own alive
        self._num_counts = 0
        self._gone: list[list[Metric]] = []  # of workers that ended

    async def run(self, load: Callable[[], Service]) -> Service:
        """Loads while the workers start, serves, and returns the service when all workers have ended. Raises what loading
        raised, and why a worker could not start."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        if HAS_LINES:
            self._lines = Lines(self._loop, self._start.stays_awake)
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._signalled, number)
        loading = self._loop.run_in_executor(None, load)
        loading.add_done_callback(self._loaded)
        watching = asyncio.create_task(self._watch())
        try:
            for _ in range(self._num):
                await self._start_one()
            await self._ended
            return await loading
        finally:
            watching.cancel()
            for peer in [*self._peers]:
                peer.send(Drain(now=True))
            await asyncio.gather(loading, return_exceptions=True)
            if self._service is not None:
                self._service.attend(None)
            if self._lines is not None:
                self._lines.close()
            for number in _SIGNALS:
                self._loop.remove_signal_handler(number)

    async def _replace(self, seconds: float) -> None:
        """Starts a worker after so many seconds."""
        await asyncio.sleep(seconds)
        await self._start_one()

    async def _start_one(self) -> None:
        if self._state.stage == DRAINING:
            return
        own, its = socket.socketpair()
        peer = Peer()
        take, closed = functools.partial(self._take, peer), functools.partial(self._closed, peer)
        peer.channel = (
            await Channel.open(own, take, closed) if self._lines is None else self._lines.open(own, take, closed)
        )
        if self._state.stage == DRAINING:  # meanwhile
            its.close()
            return
        self._peers.append(peer)
        process = multiprocessing.get_context("spawn").Process(
            target=run_worker, args=(its, self._listener, self._start), name="polyrec-http", daemon=True
        )
        # The mask is inherited: a terminal's Ctrl-C, which all processes get, does not end the workers before their requests.
        # The resource tracker, which the first spawned process would start, lifts such a mask when it has started.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            its.close()
        peer.process = process
        self._tell_facts(peer)
        peer.send(self._status())

    # Messages of workers.

    def _take(self, peer: Peer, message: Any) -> None:
        """In whichever thread."""
        match message:
            case Ask(number, search, deadline):
                self._ask(peer, number, lambda service: service.loop.search(search, deadline), self._found)
            case Cancel(number):
                if (future := peer.asked.get(number)) is not None:
                    future.cancel()
            case _:
                self._loop.call_soon_threadsafe(self._take_other, peer, message)

    def _take_other(self, peer: Peer, message: Any) -> None:
        match message:
            case Profile(number, action):
                self._ask(peer, number, lambda service: _profile(service, action), self._done)
            case AskMetrics(number):
                self._count(peer, number)
            case Counted(number, families):
                peer.counted = families
                self._one_counted(peer, number)
            case Open():
                self._tell("loading")
            case Loaded():
                peer.loaded = True
                self._open_if_ready()
                peer.send(self._status())
            case Failed(error):
                peer.error = error

    def _ask(self, peer: Peer, number: int, call: Callable[[Service], Any], done: Done) -> None:
        assert self._service is not None, "workers ask when they were told that all is ready"
        try:
            future = call(self._service)
        except PolyrecError as error:
            peer.send(Answers([(number, error)], self._status()))
            return
        peer.asked[number] = future
        future.add_done_callback(functools.partial(done, peer, number))

    def _found(self, peer: Peer, number: int, future: Future[Any]) -> None:
        """A search is done, mostly in the engine's thread: a batch's answers are sent together, when `answered` is called."""
        if threading.get_ident() != self._engine_thread or future.cancelled() or future.exception() is not None:
            self._done(peer, number, future)
        elif peer.channel is not None:
            self._done_searches.append((peer, number, future))

    def _done(self, peer: Peer, number: int, future: Future[Any]) -> None:
        """Has the event loop's thread send what is done."""
        if peer.channel is not None:
            self._done_searches.append((peer, number, future))
            if not self._is_called:
                self._is_called = True
                self._loop.call_soon_threadsafe(self._send_answers)

    def _send_answers(self) -> None:
        """In whichever thread."""
        self._is_called = False  # first: what is done from here on may not be sent below
        answers: dict[Peer, list[tuple[int, Any]]] = defaultdict(list)
        with self._sending:
            while self._done_searches:
                peer, number, future = self._done_searches.popleft()
                peer.asked.pop(number, None)
                if not future.cancelled():
                    answers[peer].append((number, _result(future)))
        for peer, results in answers.items():
            refused = any(isinstance(result, Exception) for _, result in results)
            peer.send(Answers(results, self._status() if refused else None))

    # What the engine's loop calls, as `engine.loop.Outside`.

    @property
    def stays_awake(self) -> bool:
        """By the machine."""
        return self._start.stays_awake

    def wait(self, seconds: float, is_work_here: Callable[[], bool], after_lone: Callable[[], None] | None) -> None:
        """Takes workers' messages, in the engine's thread."""
        assert self._lines is not None
        self._engine_thread = threading.get_ident()
        self._lines.wait(seconds, is_work_here, after_lone)

    def leave(self) -> None:
        """The event loop takes them again."""
        assert self._lines is not None
        self._lines.leave()

    def wake(self) -> None:
        """Ends a `wait`."""
        if self._lines is not None and threading.get_ident() != self._engine_thread:
            self._lines.wake()

    def answered(self) -> None:
        """Sends a batch's answers: few at once, many by the event loop's thread, since the next batch wants this one."""
        if len(self._done_searches) <= _FEW:
            self._send_answers()
        elif not self._is_called:
            self._is_called = True
            self._loop.call_soon_threadsafe(self._send_answers)

    def rehearse(self, search: SearchRequest, result: SearchResult) -> None:
        rehearse(Ask(0, search, None), Answers([(0, result)], None))

    # What workers have counted.

    def _count(self, peer: Peer, number: int) -> None:
        self._num_counts += 1
        count, others = self._num_counts, {other for other in self._peers if other is not peer and other.loaded}
        self._counts[count] = (peer, number, others)
        for other in others:
            other.send(Count(count))
        self._finish_count(count)
        self._loop.call_later(_COUNT_S, self._finish_count, count, True)

    def _one_counted(self, peer: Peer, count: int) -> None:
        if count in self._counts:
            self._counts[count][2].discard(peer)
            self._finish_count(count)

    def _finish_count(self, count: int, now: bool = False) -> None:
        if count in self._counts and (now or not self._counts[count][2]):
            peer, number, _ = self._counts.pop(count)
            counted = [other.counted for other in self._peers if other is not peer] + self._gone
            peer.send(Answers([(number, counted)], self._status()))

    # Stages, and the end.

    def _status(self) -> Status:
        loop = None if self._service is None else self._service.loop
        if loop is None:
            return Status(self._state.stage, True, 0, {})
        return Status(self._state.stage, loop.is_alive, loop.depth, loop.stats)

    async def _watch(self) -> None:
        """The loading thread and the engine's thread tell nobody what they do."""
        while True:
            status = self._status()
            if self._last is None or (status.stage, status.is_alive) != (self._last.stage, self._last.is_alive):
                self._broadcast(status)
            for peer in self._peers:
                self._tell_facts(peer)
            await asyncio.sleep(_WATCH_S)

    def _tell_facts(self, peer: Peer) -> None:
        if self._state.facts is not None and not peer.has_facts:
            peer.has_facts = True
            peer.send(Facts(self._state.facts))

    def _broadcast(self, message: Any) -> None:
        if isinstance(message, Status):
            self._last = message
        for peer in self._peers:
            peer.send(message)

    def _loaded(self, loading: asyncio.Future[Service]) -> None:
        if loading.cancelled() or loading.exception() is not None:
            self._drain()
            return
        self._service = loading.result()
        if self._lines is not None:
            self._service.attend(self)
        self._open_if_ready()

    def _open_if_ready(self) -> None:
        """Ready means that every worker is."""
        all_loaded = len(self._peers) == self._num and all(peer.loaded for peer in self._peers)
        if self._service is not None and all_loaded and self._state.stage not in (READY, DRAINING):
            self._state.serve(self._service)
            self._broadcast(self._status())
            self._tell("ready")

    def _tell(self, stage: str) -> None:
        """Tells `loading` when the first worker answers probes, then `ready`: each once and in this order."""
        while stage in self._untold:
            self._on_stage(self._untold.popleft())

    def _signalled(self, number: int) -> None:
        """First signal: finish what is in flight. A second SIGINT: stop at once."""
        if self._state.stage == DRAINING and number == signal.SIGINT:
            self._broadcast(Drain(now=True))
        else:
            self._drain()

    def _drain(self) -> None:
        self._state.stage = DRAINING
        self._listener.close()
        self._broadcast(self._status())
        self._broadcast(Drain())
        self._end_if_alone()

    def _closed(self, peer: Peer) -> None:
        """A worker has ended, or never came up."""
        peer.channel = None
        if peer in self._peers:
            self._peers.remove(peer)
        for future in [*peer.asked.values()]:
            future.cancel()
        for count in [*self._counts]:
            self._one_counted(peer, count)
        # Its gauges are of requests that are gone with it.
        self._gone.append([family for family in peer.counted if family.type != "gauge"])
        process = peer.process
        if process is not None and not self._ended.done():
            self._loop.run_in_executor(None, process.join)
        if self._state.stage == DRAINING:
            self._end_if_alone()
        elif peer.loaded or self._state.stage == READY:  # once ready, the others go on whatever happens to one
            self._logger.error(
                "an HTTP worker ended and is replaced",
                exc_info=peer.error,
                extra={FIELDS: {"code": "http_worker_ended"}},
            )
            task = asyncio.ensure_future(self._replace(0.0 if peer.loaded else _RETRY_S))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)
        elif not self._ended.done():
            self._ended.set_exception(
                peer.error or RuntimeError("An HTTP worker ended as it started; see the log above.")
            )

    def _end_if_alone(self) -> None:
        if not self._peers and not self._ended.done():
            self._ended.set_result(None)


def _profile(service: Service, action: Literal["start", "stop"]) -> Future[Any]:
    assert isinstance(service.profile, OwnProfile)
    return service.profile.start() if action == "start" else service.profile.stop()


def _result(future: Future[Any]) -> Any:
    """The result, or the error in a form that can be sent: of our own mistakes, the text of the traceback."""
    error = future.exception()
    if error is None or isinstance(error, PolyrecError):
        return future.result() if error is None else error
    return RuntimeError("".join(traceback.format_exception(error)))
