"""Waiting for a client's body and for the engine's answer, while the client may leave and the clock runs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from fastapi import Request

from ..core.errors import RequestError
from .at_once import done_within

T = TypeVar("T")
_LISTEN_AFTER = 0.02  # seconds of waiting after which a client's leaving is listened for: it takes a task of its own


class Deadline:
    """Counts a request's seconds from its arrival. set_by: the name of what says how many it has."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.set_by = seconds, "--timeout"
        self._start = time.monotonic()

    def shorten(self, timeout_ms: int | None) -> None:
        """What the request itself asks for; it cannot have more than the server gives."""
        if timeout_ms is not None and timeout_ms < self.seconds * 1000:
            self.seconds, self.set_by = timeout_ms / 1000, "timeout_ms"

    @property
    def elapsed(self) -> float:
        """Seconds since arrival."""
        return time.monotonic() - self._start

    @property
    def at(self) -> float:
        """When it is over, in `time.monotonic` seconds, which all processes of a machine share."""
        return self._start + self.seconds

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.seconds - self.elapsed)


async def read_body(request: Request, limit: int, deadline: Deadline) -> bytes:
    """The whole body; refuses another content type (415), more than `limit` bytes (413), and slow senders (408)."""
    headers: dict[bytes, bytes] = dict(request.scope["headers"][::-1])  # of several of one name, the first
    content_type = headers.get(b"content-type", b"application/json").decode("latin-1").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(
            "content_type_unsupported",
            f"The body's type is '{content_type[:80]}'.",
            "Send the header 'Content-Type: application/json'.",
            status=415,
        )
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced[:20]) > limit:
        raise _too_large(limit)
    try:
        return await _within(deadline.left, _receive_body(request, limit))
    except asyncio.TimeoutError:
        raise RequestError(
            "body_too_slow",
            f"The body did not arrive within {deadline.seconds:g} s.",
            "Send it faster, or raise --timeout.",
            status=408,
        ) from None


async def wait_answer(future: Future[T] | asyncio.Future[T], request: Request, deadline: Deadline) -> T:
    """The engine's answer; when the client leaves (499) or the time is over (504) the engine's request is cancelled.

    Call it after the whole body was read: from then on the only message a client can send is its leaving.
    """
    answer = asyncio.wrap_future(future)
    leaving: asyncio.Future[Any] | None = None
    try:
        await done_within(answer, min(deadline.left, _LISTEN_AFTER))
        if not answer.done():
            leaving = asyncio.ensure_future(request.receive())
            both: set[asyncio.Future[Any]] = {answer, leaving}
            await asyncio.wait(both, timeout=deadline.left, return_when=asyncio.FIRST_COMPLETED)
        if answer.cancelled():
            raise RequestError("shutting_down", "The server is shutting down.", "Ask again elsewhere.", status=503)
        if answer.done():
            return answer.result()
        if leaving is not None and leaving.done():
            raise client_left()
        raise RequestError(
            "deadline_exceeded",
            f"No answer within {deadline.seconds:g} s.",
            f"Ask for fewer items, send fewer requests at a time, or raise {deadline.set_by}.",
            status=504,
        )
    finally:
        if leaving is not None:
            leaving.cancel()
        if not answer.done():
            answer.cancel()  # reaches the engine's future too


def client_left() -> RequestError:
    """Nobody reads this answer; it is how logs and metrics name the case."""
    return RequestError("client_left", "The client closed the connection.", status=499)


async def _within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """asyncio.wait_for, which takes a timer, and before Python 3.12 a task, also for what need not wait, as most bodies."""
    try:
        begun = _Begun(coroutine, coroutine.send(None))
    except StopIteration as ended:
        return cast(T, ended.value)
    if sys.version_info >= (3, 11):
        async with asyncio.timeout(seconds):
            return cast(T, await begun)
    return cast(T, await asyncio.wait_for(begun.ended(), seconds))


class _Begun:
    """A coroutine that waits for `first`; can be awaited."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], first: Any) -> None:
        self._coroutine, self._first = coroutine, first

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            yield self._first
            return (yield from self._coroutine.__await__())
        finally:
            self._coroutine.close()

    async def ended(self) -> Any:
        return await self


async def _receive_body(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise client_left()
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise _too_large(limit)
        more = message.get("more_body", False)
    return b"".join(chunks)


def _too_large(limit: int) -> RequestError:
    return RequestError(
        "body_too_large", f"The body has more than {limit} bytes.", "Send a shorter history or fewer items.", status=413
    )
