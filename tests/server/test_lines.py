"""Lines, which two threads read: whoever does, messages come whole, once and in order, and the other end's end is told."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from polyrec.server.awake import Awake
from polyrec.server.channel import Cancel, Channel, packed
from polyrec.server.http import run_loop
from polyrec.server.remote import RemoteLoop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="lines are Linux's")
lines = pytest.importorskip("polyrec.server.lines")
WAIT_S = 20


class Engine:
    """A thread that waits at lines as the engine's loop does, while it may."""

    def __init__(self, here: Any) -> None:
        self.lines = here
        self.work: list[Any] = []
        self.waits = 0
        self.ends = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self.ends:
            self.waits += 1
            self.lines.wait(WAIT_S, lambda: bool(self.work) or self.ends, None)
            if self.work:
                self.lines.leave()
            self.work.clear()
        self.lines.leave()

    def end(self) -> None:
        self.ends = True
        self.lines.wake()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def is_handed_over(here: Any) -> bool:
    """Whether the engine's thread reads, and the event loop's no more."""
    return here._engine_reads and not here._lock.locked()


async def until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


@pytest.fixture(params=[asyncio.run, run_loop], ids=["asyncio", "uvloop"])
def run_in_loop(request) -> Callable[..., Any]:
    return request.param


@pytest.mark.parametrize("engine_idles", [True, False])
def test_who_reads(run_in_loop, engine_idles: bool) -> None:
    """The engine's thread while it idles, the event loop's else."""

    async def run() -> None:
        own, its = socket.socketpair()
        taken: list[tuple[Any, int]] = []
        closed: list[int] = []
        here = lines.Lines(asyncio.get_running_loop(), False)
        engine = Engine(here)

        def take(message: Any) -> None:
            taken.append((message, threading.get_ident()))

        here.open(own, take, lambda: closed.append(threading.get_ident()))
        if engine_idles:
            engine.thread.start()
            await until(lambda: is_handed_over(here))
        stream = b"".join(packed(Cancel(number)) for number in range(20))
        for place in range(0, len(stream), 7):
            its.send(stream[place : place + 7])
            await asyncio.sleep(0)
        await until(lambda: len(taken) == 20)
        assert [message for message, _ in taken] == [Cancel(number) for number in range(20)]
        reader = engine.thread.ident if engine_idles else threading.get_ident()
        assert {ident for _, ident in taken} == {reader}
        its.close()
        await until(lambda: closed)
        assert closed == [threading.get_ident()]
        if engine_idles:
            engine.end()
        here.close()

    run_in_loop(run())


def test_once_there_is_work_the_event_loop_reads(run_in_loop) -> None:
    async def run() -> None:
        own, its = socket.socketpair()
        taken: list[int] = []
        here = lines.Lines(asyncio.get_running_loop(), False)
        works, entered = threading.Event(), threading.Event()

        def take(message: Any) -> None:
            taken.append(threading.get_ident())

        def engine() -> None:
            here.wait(WAIT_S, lambda: bool(taken), print)
            here.leave()
            entered.set()
            assert works.wait(WAIT_S)  # the batch
            here.wait(0.001, lambda: False, print)
            here.leave()

        line = here.open(own, take, print)
        thread = threading.Thread(target=engine)
        thread.start()
        await until(lambda: is_handed_over(here))
        its.send(packed(Cancel(1)))
        await until(entered.is_set)
        its.send(packed(Cancel(2)))
        await until(lambda: len(taken) == 2)
        assert taken == [thread.ident, threading.get_ident()]
        works.set()
        thread.join(WAIT_S)
        its.send(packed(Cancel(3)))
        await until(lambda: len(taken) == 3)
        assert taken[2] == threading.get_ident()
        its.close()
        await until(lambda: line.is_closed)

    run_in_loop(run())


def test_what_waits_for_the_other_end_arrives_whole_and_in_order(run_in_loop) -> None:
    """Far more than a socket holds, sent by two threads while nobody reads."""

    async def run() -> None:
        own, its = socket.socketpair()
        here = lines.Lines(asyncio.get_running_loop(), False)
        line = here.open(own, print, print)

        def send(first: int) -> None:
            for number in range(first, first + 100, 2):
                line.send((number, bytes(20_000)))

        threads = [threading.Thread(target=send, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert line.has_unsent
        received: list[Any] = []
        reader = await Channel.open(its, received.append, print)
        await until(lambda: len(received) == 100)
        assert not line.has_unsent
        numbers = [number for number, _ in received]
        for first in (0, 1):
            assert [number for number in numbers if number % 2 == first] == [*range(first, 100, 2)]
        reader.close()
        await until(lambda: line.is_closed)
        line.send(Cancel(1))  # nobody is there: no error
        here.close()

    run_in_loop(run())


def test_waking_ends_a_wait_and_nothing_is_lost(run_in_loop) -> None:
    async def run() -> None:
        here = lines.Lines(asyncio.get_running_loop(), False)
        engine = Engine(here)
        engine.thread.start()
        for number in range(200):
            engine.work.append(number)
            here.wake()
            await until(lambda: not engine.work)
        engine.end()
        assert engine.waits > 1

    begun = time.monotonic()
    run_in_loop(run())
    assert time.monotonic() - begun < WAIT_S  # no wait ran into its limit


@pytest.mark.parametrize("engine_idles", [True, False])
def test_a_message_that_fails_closes_the_line_alone(run_in_loop, engine_idles: bool) -> None:
    """The engine's thread goes on, and the event loop tells the error."""

    async def run() -> list[str]:
        told: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(str(context["exception"])))

        def take(message: Any) -> None:
            raise RuntimeError("a bug")

        own, its = socket.socketpair()
        here = lines.Lines(asyncio.get_running_loop(), False)
        engine = Engine(here)
        here.open(own, take, lambda: told.append("closed"))
        if engine_idles:
            engine.thread.start()
            await until(lambda: is_handed_over(here))
        its.send(packed(Cancel(1)))
        await until(lambda: len(told) == 2)
        if engine_idles:
            assert engine.thread.is_alive()
            engine.end()
        assert its.recv(1) == b""
        its.close()
        return told

    assert sorted(run_in_loop(run())) == ["a bug", "closed"]


# Staying awake.


def test_after_a_lone_request_the_engine_s_thread_looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(lines, "time", SimpleNamespace(monotonic=lambda: next(ticks) * lines.NEXT_S / 20))

    class Counting:
        def __init__(self) -> None:
            self.timeouts: list[float] = []

        def poll(self, timeout: float) -> list[Any]:
            self.timeouts.append(timeout)
            return []

    rehearsed: list[int] = []

    async def run(stays_awake: bool, was_alone: bool) -> list[float]:
        here = lines.Lines(asyncio.get_running_loop(), stays_awake)
        here._engines = Counting()
        after_lone = (lambda: rehearsed.append(len(here._engines.timeouts))) if was_alone else None
        for _ in range(2):
            here.wait(0.5, lambda: False, after_lone)
        return here._engines.timeouts

    assert asyncio.run(run(True, True)).count(0) > 10
    assert rehearsed == [0], "once, and before it looks"
    assert asyncio.run(run(True, False)) == asyncio.run(run(False, True)) == [0, 0.5] * 2
    assert rehearsed == [0]


def test_an_event_loop_stays_awake_as_long_as_it_is_told(run_in_loop, monkeypatch: pytest.MonkeyPatch) -> None:
    now, turns = 0.0, 0
    turn = Awake._turn

    def counted(self: Awake) -> None:
        nonlocal turns
        turns += 1
        turn(self)

    monkeypatch.setattr(Awake, "_turn", counted)
    monkeypatch.setattr("polyrec.server.awake.time", SimpleNamespace(monotonic=lambda: now))

    async def turns_in_ten() -> int:
        """Of the loop's own turns."""
        before = turns
        for _ in range(10):
            await asyncio.sleep(0)
        return turns - before

    async def run() -> None:
        nonlocal now
        awake = Awake()
        awake.stay(0.05)
        assert await turns_in_ten() == 10
        awake.stay(0.05)
        assert await turns_in_ten() == 10
        now = 0.06
        assert await turns_in_ten() == 1
        assert await turns_in_ten() == 0
        awake.stay(WAIT_S)
        assert await turns_in_ten() == 10
        awake.stay(0)
        assert await turns_in_ten() == 1
        assert await turns_in_ten() == 0

    run_in_loop(run())


def test_a_worker_stays_awake_for_a_lone_answer_alone() -> None:
    told: list[float] = []

    class Told(Awake):
        def stay(self, seconds: float) -> None:
            told.append(seconds)

    class Sent:
        def send(self, message: Any) -> None:
            pass

    async def run() -> None:
        loop = RemoteLoop(Told())
        loop.connect(Sent())  # type: ignore[arg-type]
        first, second = loop.search("one"), loop.search("two")
        first.cancel()
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)

    asyncio.run(run())
    lone, several, several_left, none_left = told
    assert lone > none_left > several == several_left == 0
