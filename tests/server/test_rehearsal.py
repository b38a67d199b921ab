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


class Sent:
    def send(self, message: Any) -> None:
        pass


def waiting_loop(awake: Awake | None) -> tuple[RemoteLoop, list[float]]:
    """A loop that can ask, and when it rehearsed."""
    loop, rehearsed = RemoteLoop(awake), []
    loop.connect(Sent())  # type: ignore[arg-type]
    loop.rehearse = lambda: rehearsed.append(time.monotonic())
    return loop, rehearsed


def test_it_rehearses_until_the_answer_is_there() -> None:
    async def run() -> None:
        loop, rehearsed = waiting_loop(Awake())
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
        for number in range(num):
            loop.search(number)
        await asyncio.sleep(0.01)
        assert not rehearsed

    asyncio.run(run())


def test_both_halves_are_rehearsed_in_turn() -> None:
    class Front(FakeFront):
        calls: list[str] = []  # noqa: RUF012

        def prepare(self, request: RecommendRequest) -> Any:
            self.calls.append("prepare")
            return super().prepare(request)

        def finish(self, prepared: Any, found: Recommendation) -> Recommendation:
            self.calls.append("finish")
            return super().finish(prepared, found)

    rehearsal = Rehearsal(Front())  # type: ignore[arg-type]
    Front.calls.clear()
    for _ in range(4):
        rehearsal()
    assert Front.calls == ["prepare", "finish", "prepare", "finish"]
