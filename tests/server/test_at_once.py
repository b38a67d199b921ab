"""Futures whose waiters go on at once keep to what asyncio promises of all others."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

import pytest

from polyrec.server.at_once import AtOnce, done_within
from polyrec.server.http import run_loop


@pytest.fixture(params=[asyncio.run, run_loop], ids=["asyncio", "uvloop"])
def run_in_loop(request) -> Callable[..., Any]:
    return request.param


def loops_turn(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Calls it as the event loop calls what a socket has for it: outside of all tasks."""
    loop = asyncio.get_running_loop()
    called = loop.create_future()

    def call() -> None:
        try:
            called.set_result(function())
        except AssertionError as error:
            called.set_exception(error)

    loop.call_soon(call)
    return called


def test_who_waits_has_gone_on_before_give_returns(run_in_loop) -> None:
    """In its own context, whether it waits for the future itself or for a while."""
    name = contextvars.ContextVar("name", default="nobody")

    async def run() -> None:
        future: AtOnce[str] = AtOnce(asyncio.get_running_loop())
        seen: list[Any] = []

        async def wait(own: str, for_a_while: bool) -> None:
            name.set(own)
            if for_a_while:
                await done_within(future, 20)
            seen.append((await future, name.get(), asyncio.current_task() is task_of[own]))

        task_of = {own: asyncio.ensure_future(wait(own, own == "b")) for own in ("a", "b")}
        await asyncio.sleep(0.01)

        def give() -> list[Any]:
            future.give("found")
            return [*seen]

        assert await loops_turn(give) == [("found", "a", True), ("found", "b", True)]
        await asyncio.gather(*task_of.values())

    run_in_loop(run())


def test_within_a_task_no_other_one_is_run(run_in_loop) -> None:
    async def run() -> None:
        future: AtOnce[int] = AtOnce(asyncio.get_running_loop())
        seen: list[int] = []
        future.add_done_callback(lambda done: seen.append(done.result()))
        future.give(1)
        assert seen == []
        await asyncio.sleep(0)
        assert seen == [1]

    run_in_loop(run())


@pytest.mark.parametrize("end", ["result", "exception", "cancel"])
def test_other_ends_are_as_with_every_future(run_in_loop, end: str) -> None:
    async def run() -> None:
        future: AtOnce[int] = AtOnce(asyncio.get_running_loop())
        waiting, seen = asyncio.ensure_future(asyncio.wait([future])), list[str]()
        await asyncio.sleep(0.01)
        future.add_done_callback(lambda done: seen.append("soon"))
        removed = lambda done: seen.append("removed")  # noqa: E731
        future.add_done_callback(removed)
        assert future.remove_done_callback(removed) == 1

        def finish() -> list[str]:
            if end == "result":
                future.set_result(1)
            elif end == "exception":
                future.set_exception(ValueError("x"))
            else:
                assert future.cancel()
            return [*seen]

        assert await loops_turn(finish) == []
        await waiting
        assert seen == ["soon"]
        future.add_done_callback(lambda done: seen.append("late"))
        await asyncio.sleep(0)
        assert seen == ["soon", "late"]
        assert future.cancelled() == (end == "cancel")
        assert end != "exception" or isinstance(future.exception(), ValueError)

    run_in_loop(run())


@pytest.mark.parametrize("kind", ["plain", "at once"])
def test_a_wait_ends_in_time(run_in_loop, kind: str) -> None:
    """And leaves the future alone; one that is done is not waited for."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = AtOnce(loop) if kind == "at once" else loop.create_future()
        began = loop.time()
        await done_within(future, 0.03)
        assert 0.02 < loop.time() - began < 5
        assert not future.done()
        loop.call_later(0.01, future.set_result, 1)
        await done_within(future, 20)
        assert future.done()
        await done_within(future, 20)
        assert loop.time() - began < 5

    run_in_loop(run())


def test_who_is_cancelled_while_it_waits_stops(run_in_loop) -> None:
    async def run() -> None:
        future: AtOnce[int] = AtOnce(asyncio.get_running_loop())
        task = asyncio.ensure_future(done_within(future, 0.05))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await loops_turn(lambda: future.give(1))
        await asyncio.sleep(0.06)  # what is left of the wait does nothing

    run_in_loop(run())
