"""Bodies that come at once, in parts, and too late; and notes of answers that wait for a quieter moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from polyrec.core.errors import RequestError
from polyrec.server import app, waiting
from polyrec.server.http import run_loop
from polyrec.server.metrics import ServerMetrics
from polyrec.server.protocol import WHOLE
from polyrec.server.state import ServerState
from polyrec.server.waiting import Deadline, read_body

PARTS = (b'{"history":', b' ["a"]}')


def request_of(receive: Callable[[], Any]) -> Request:
    return Request({"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}, receive)


@pytest.fixture(params=[asyncio.run, run_loop], ids=["asyncio", "uvloop"])
def run_in_loop(request) -> Callable[..., Any]:
    return request.param


@pytest.fixture(params=[None, (3, 10)], ids=["this Python", "without asyncio.timeout"])
def python(request, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(waiting, "sys", SimpleNamespace(version_info=request.param))


@pytest.mark.parametrize("waits", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
def test_a_body_comes_at_once_or_in_parts(run_in_loop, python, waits: tuple[int, int]) -> None:
    async def run() -> bytes:
        number = -1

        async def receive() -> dict[str, Any]:
            nonlocal number
            number += 1
            if waits[number]:
                await asyncio.sleep(0.01)
            return {"type": "http.request", "body": PARTS[number], "more_body": number == 0}

        return await read_body(request_of(receive), 100, Deadline(20))

    assert run_in_loop(run()) == b"".join(PARTS)


def silent(ended: list[bool]) -> Callable[[], Any]:
    """A client that sends nothing; `ended` is told when nobody waits for it any more."""

    async def receive() -> dict[str, Any]:
        try:
            await asyncio.sleep(20)
        finally:
            ended.append(True)
        return {"type": "http.disconnect"}

    return receive


def test_a_body_that_comes_too_late_is_given_up(run_in_loop, python) -> None:
    ended: list[bool] = []

    async def run() -> None:
        with pytest.raises(RequestError) as caught:
            await read_body(request_of(silent(ended)), 100, Deadline(0.02))
        assert (caught.value.code, caught.value.status) == ("body_too_slow", 408)

    run_in_loop(run())
    assert ended == [True]


def test_a_request_shortens_its_time_and_never_lengthens_it() -> None:
    deadline = Deadline(0.5)
    end = deadline.at
    for timeout_ms in (None, 500, 501, 10**400):
        deadline.shorten(timeout_ms)
        assert (deadline.at, deadline.set_by) == (end, "--timeout")
    deadline.shorten(499)
    assert deadline.at == pytest.approx(end - 0.001, abs=1e-6)
    assert (deadline.seconds, deadline.set_by) == (0.499, "timeout_ms")


def test_who_stops_waiting_for_a_body_stops(run_in_loop, python) -> None:
    """A cancelled task is not kept by a body that was begun."""
    ended: list[bool] = []

    async def run() -> None:
        task = asyncio.ensure_future(read_body(request_of(silent(ended)), 100, Deadline(20)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_in_loop(run())
    assert ended == [True]


def test_notes_are_made_a_moment_later_or_when_the_counts_are_asked_for(run_in_loop) -> None:
    async def run() -> None:
        metrics, noted = ServerMetrics(ServerState("model"), 1), list[int]()
        for number in range(3):
            metrics.note_later(lambda number=number: noted.append(number))
        assert noted == []
        await asyncio.sleep(0.05)
        assert noted == [0, 1, 2]
        metrics.note_later(lambda: noted.append(3))
        metrics.counted()
        assert noted == [0, 1, 2, 3]
        metrics.note_later(lambda: noted.append(4))
        await asyncio.sleep(0.05)
        assert noted == [0, 1, 2, 3, 4]

    run_in_loop(run())


@pytest.mark.parametrize("is_there", [True, False])
def test_an_answer_counts_whether_its_client_is_still_there(run_in_loop, is_there: bool) -> None:
    noted = list[str]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        noted.append(message["type"])
        if not is_there:
            raise RuntimeError("the connection is closed")

    async def run() -> None:
        await app.Noted(b"{}", "application/json", lambda: noted.append("noted"))({"type": "http"}, receive, send)

    if is_there:
        run_in_loop(run())
        assert noted == ["http.response.start", "http.response.body", "noted"]
    else:
        with pytest.raises(RuntimeError, match="closed"):
            run_in_loop(run())
        assert noted == ["http.response.start", "noted"]


@pytest.mark.parametrize("takes", [True, False])
def test_an_answer_goes_in_few_steps_where_the_connection_takes_it(takes: bool) -> None:
    given, sent = list[tuple[Any, bytes]](), list[str]()

    def answer_whole(scope: Any, headers: Any, body: bytes) -> bool:
        given.append((dict(headers), body))
        return takes

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])

    scope = {"type": "http", "extensions": {WHOLE: answer_whole}}
    asyncio.run(app.Noted(b"{}", "application/json", lambda: sent.append("noted"))(scope, None, send))  # type: ignore[arg-type]
    assert given == [({b"content-length": b"2", b"content-type": b"application/json"}, b"{}")]
    assert sent == (["noted"] if takes else ["http.response.start", "http.response.body", "noted"])
