"""What a worker does while it waits for a lone answer: that it happens, when, and that it changes nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fake_engine import FakeFront

from polyrec.core.request import Recommendation, RecommendRequest
from polyrec.server import remote
from polyrec.server.awake import Awake
from polyrec.server.channel import Answers
from polyrec.server.rehearsal import Rehearsal
from polyrec.server.remote import RemoteLoop
from polyrec.server.settings import ServerSettings
from polyrec.server.state import Service


class Sent:
    def send(self, message: Any) -> None:
        pass


def waiting_loop(awake: Awake | None) -> tuple[RemoteLoop, list[float]]:
    """A loop that can ask, and when it rehearsed."""
    loop, rehearsed = RemoteLoop(awake), []
    loop.connect(Sent())  # type: ignore[arg-type]
    loop.rehearse = lambda: rehearsed.append(time.monotonic())
    return loop, rehearsed


def test_it_rehearses_until_the_answer_is_expected() -> None:
    """Which takes as long as the last one did; nobody knows when the first comes."""

    async def run() -> None:
        loop, rehearsed = waiting_loop(Awake())
        for number in range(2):
            expected = loop._took
            asked = loop.search("one")
            started = time.monotonic()
            await asyncio.sleep(0.04)
            loop.take(Answers([(number, "found")], None))
            assert await asked == "found"
            await asyncio.sleep(0)
            assert (len(rehearsed) > 2) == (number == 1)
        assert all(when - started < expected - 0.001 for when in rehearsed)


@pytest.mark.parametrize("other", ["metrics", "cancelled", "refused"])
def test_what_is_no_answer_tells_nothing_of_when_the_next_one_comes(other: str) -> None:
    async def run() -> None:
        loop, _ = waiting_loop(Awake())
        loop._took = 0.02
        if other == "metrics":
            asked: Any = asyncio.ensure_future(loop.counts_of_others())
        else:
            asked = loop.search("one")
        await asyncio.sleep(0.05)
        if other == "cancelled":
            asked.cancel()
        else:
            loop.take(Answers([(0, [] if other == "metrics" else ValueError("refused"))], None))
        await asyncio.wait([asked])
        await asyncio.sleep(0)
        assert other != "refused" or isinstance(asked.exception(), ValueError)
        assert (loop._took, loop._lone) == (0.02, None)

    asyncio.run(run())

    asyncio.run(run())


def test_it_rehearses_no_more_when_the_answer_is_there() -> None:
    async def run() -> None:
        loop, rehearsed = waiting_loop(Awake())
        loop._took = 1.0
        asked = loop.search("one")
        await asyncio.sleep(0.03)
        assert len(rehearsed) > 2
        loop.take(Answers([(0, "found")], None))
        assert await asked == "found"
        rehearsed.clear()
        await asyncio.sleep(0.01)
        assert not rehearsed

    asyncio.run(run())


def test_it_ends_when_the_answer_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 0.01)

    async def run() -> None:
        loop, rehearsed = waiting_loop(Awake())
        loop._took = 1.0
        loop.search("one")
        started = time.monotonic()
        await asyncio.sleep(0.04)
        assert rehearsed
        assert all(when - started < 0.02 for when in rehearsed)

    asyncio.run(run())


@pytest.mark.parametrize(("awake", "num"), [(None, 1), (Awake(), 2)])
def test_a_worker_that_sleeps_or_has_other_work_rehearses_nothing(awake: Awake | None, num: int) -> None:
    async def run() -> None:
        loop, rehearsed = waiting_loop(awake)
        loop._took = 1.0
        for number in range(num):
            loop.search(number)
        await asyncio.sleep(0.01)
        assert not rehearsed

    asyncio.run(run())


class Front(FakeFront):
    """Notes what it is asked."""

    def __init__(self, history: list[str]) -> None:
        self.history, self.calls = history, []

    def prepare(self, request: RecommendRequest) -> Any:
        self.calls.append("prepare")
        return super().prepare(request)

    def finish(self, prepared: Any, found: Recommendation) -> Recommendation:
        self.calls.append("finish")
        return super().finish(prepared, found)

    def sample(self) -> tuple[list[str], int, Recommendation]:
        return self.history, 1, super().sample()[2]


def rehearsal_of(front: Front, **settings: Any) -> Rehearsal:
    service = Service(None, front, None, None)  # type: ignore[arg-type]
    return Rehearsal(service, ServerSettings(**settings))


@pytest.mark.parametrize("settings", [{}, {"api_key": "secret"}, {"max_body_bytes": 1024, "max_beam_width": 1}])
def test_both_halves_are_rehearsed_in_turn(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """In this thread, whatever the settings; and nothing is logged."""
    caplog.set_level("DEBUG")

    async def run() -> None:
        front = Front([f"i{row}" * 20 for row in range(3000)])
        rehearsal = rehearsal_of(front, **settings)
        written = [0]
        for _ in range(4):
            rehearsal()
            await asyncio.sleep(0.005)
            written.append(rehearsal.written)
        assert front.calls == ["prepare", "finish", "prepare", "finish"]
        assert written[0] == written[1] < written[2] == written[3] < written[4]

    asyncio.run(run())
    assert not [record for record in caplog.records if record.name != "asyncio"]


def test_an_answer_that_comes_too_late_is_no_end() -> None:
    async def run() -> None:
        front = Front(["i0"])
        rehearsal = rehearsal_of(front, timeout=0.01)
        rehearsal()
        await asyncio.sleep(0.05)
        for _ in range(3):
            rehearsal()
            await asyncio.sleep(0.002)
        assert front.calls == ["prepare", "prepare", "finish"]

    asyncio.run(run())


def test_one_cut_short_by_the_end_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        rehearsal = rehearsal_of(Front(["i0"]))
        rehearsal()
        await asyncio.sleep(0.005)

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
