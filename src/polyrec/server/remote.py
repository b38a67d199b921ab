"""The engine as an HTTP worker sees it: searches, status, profiles and counts, all through the channel to its process."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from prometheus_client import Metric

from ..core.awake import ANSWER_S, NEXT_S
from ..core.errors import RequestError
from .at_once import AtOnce
from .awake import Awake
from .channel import Answers, Ask, AskMetrics, Cancel, Profile, Status

_REHEARSE_S = 0.001  # between two rehearsals: in some milliseconds a core's caches lose what it did before
# Before the answer is expected, when rehearsals end: else answers wait for the last of them.
_REHEARSED_S = 0.0015


class Sender(Protocol):
    """What of a `Channel` is needed here."""

    def send(self, message: Any) -> None:
        """Never waits."""


class RemoteLoop:
    """`EngineLoop`'s surface. Used by the event loop's thread alone. awake: what keeps that thread from sleeping while it waits
    for one answer only; None: nothing. rehearse: called again and again meanwhile, see `rehearsal`."""

    def __init__(self, awake: Awake | None = None) -> None:
        self._awake = awake
        self.rehearse: Callable[[], None] | None = None
        self.status = Status("starting", False, 0, {})
        self._channel: Sender | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, AtOnce[Any]] = {}
        self._lone: tuple[int, float] | None = None  # the search that is all that is waited for, and since when
        self._took = 0.0  # seconds that the last such answer took

    def connect(self, channel: Sender) -> None:
        """From now on it can ask."""
        self._channel = channel

    def search(self, search: Any, deadline: float | None = None) -> asyncio.Future[Any]:
        """Queues a search in the engine's process. A refusal (`queue_full`, …) is the future's exception."""
        future = self._ask(lambda number: Ask(number, search, deadline))
        if self._awake is not None and len(self._asked) == 1:
            self._lone = (next(iter(self._asked)), time.monotonic())
            self._rehearse_later(self._lone[0])
        return future

    def profile(self, action: Literal["start", "stop"]) -> asyncio.Future[Any]:
        """Starts or stops a profile of the engine."""
        return self._ask(lambda number: Profile(number, action))

    async def counts_of_others(self) -> list[list[Metric]]:
        """What each of the other workers has counted so far."""
        return await self._ask(AskMetrics)

    def take(self, message: Answers) -> None:
        """Gives answers to who waits for them, who then goes on before this returns."""
        self.status = message.status or self.status
        for number, result in message.results:
            future = self._asked.get(number)
            if future is None or future.done():
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.give(result)

    def close(self) -> None:
        """The engine's process is gone."""
        self._channel = None
        self.status = Status(self.status.stage, False, 0, self.status.stats)
        for future in [*self._asked.values()]:
            if not future.done():
                future.set_exception(
                    RequestError("engine_failed", "The engine failed.", "See the server's log; restart it.", status=500)
                )

    def drain(self, timeout: float | None = None) -> None:
        """The engine's process drains its loop itself."""

    @property
    def is_alive(self) -> bool:
        """As of the last message."""
        return self.status.is_alive

    @property
    def depth(self) -> int:
        """As of the last message."""
        return self.status.depth

    @property
    def stats(self) -> Mapping[str, float]:
        """As of the last message."""
        return self.status.stats

    def _ask(self, message: Callable[[int], Any]) -> asyncio.Future[Any]:
        if self._channel is None:
            raise RequestError("stopping", "The server is stopping.", "Ask another one.", status=503)
        number = next(self._numbers)
        self._channel.send(message(number))  # first: all else is done while the engine has it
        future: AtOnce[Any] = AtOnce(asyncio.get_running_loop())
        self._asked[number] = future
        future.add_done_callback(functools.partial(self._forget, number))
        if self._awake is not None:  # of several, one finds the others' caches warm, and the core is wanted for work
            self._awake.stay(ANSWER_S if len(self._asked) == 1 else 0.0)
        self._lone = None
        return future

    def _rehearse_later(self, number: int) -> None:
        if self.rehearse is not None and self._is_long_until_answered(number):
            asyncio.get_running_loop().call_later(_REHEARSE_S, self._rehearse, number)

    def _rehearse(self, number: int) -> None:
        if self.rehearse is not None and self._is_long_until_answered(number):
            self.rehearse()
            self._rehearse_later(number)

    def _is_long_until_answered(self, number: int) -> bool:
        """Whether that answer is all that is waited for, and is not expected soon: it takes as long as the last one did."""
        if self._lone is None or self._lone[0] != number:
            return False
        return time.monotonic() < self._lone[1] + min(self._took - _REHEARSED_S, ANSWER_S)

    def _forget(self, number: int, future: asyncio.Future[Any]) -> None:
        del self._asked[number]
        if self._lone is not None and self._lone[0] == number:
            if not future.cancelled() and future.exception() is None:
                self._took = time.monotonic() - self._lone[1]
            self._lone = None
        if self._awake is not None:
            self._awake.stay(0.0 if self._asked else NEXT_S)
        if future.cancelled() and self._channel is not None:
            self._channel.send(Cancel(number))


class RemoteProfile:
    """`profile.Profile`'s surface."""

    def __init__(self, loop: RemoteLoop) -> None:
        self._loop = loop

    def start(self) -> asyncio.Future[None]:
        """Between two batches."""
        return self._loop.profile("start")

    def stop(self) -> asyncio.Future[Path]:
        """Between two batches; the future names the trace's file."""
        return self._loop.profile("stop")
