"""What the engine's process and an HTTP worker say to each other, and the socket that carries it.

Messages are pickled: both ends are one program, started by one another over a socket that nobody else can open.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from prometheus_client import Metric

from ..engine.searches import SearchRequest, SearchResult

_LENGTH = 4  # bytes before each message
_SEARCH, _FOUND = "search", "found"  # what tuples are


@dataclass(frozen=True)
class Ask:
    """Worker: search this. number: the worker's own, which the answer bears."""

    number: int
    search: Any
    deadline: float | None


@dataclass(frozen=True)
class Cancel:
    """Worker: nobody waits for that answer any more."""

    number: int


@dataclass(frozen=True)
class Profile:
    """Worker: start or stop a profile; answered like a search."""

    number: int
    action: Literal["start", "stop"]


@dataclass(frozen=True)
class AskMetrics:
    """Worker: what have the other workers counted?"""

    number: int


@dataclass(frozen=True)
class Counted:
    """Worker: what this one has counted. number: of `Count`."""

    number: int
    families: list[Metric]


@dataclass(frozen=True)
class Open:
    """Worker: it takes connections."""


@dataclass(frozen=True)
class Loaded:
    """Worker: it can answer requests."""


@dataclass(frozen=True)
class Failed:
    """Worker: it cannot start, and ends."""

    error: Exception


@dataclass(frozen=True)
class Status:
    """Engine's process: how things stand. depth: searches that wait."""

    stage: str
    is_alive: bool
    depth: int
    stats: Mapping[str, float]


@dataclass(frozen=True)
class Facts:
    """Engine's process: the model is loaded, and this is what the front must know of it."""

    facts: Any


@dataclass(frozen=True)
class Answers:
    """Engine's process: number and result of each; a result that is an exception is raised. status: None where nobody needs it
    now, as with the answers of searches; it is half of such a message."""

    results: list[tuple[int, Any]]
    status: Status | None


@dataclass(frozen=True)
class Count:
    """Engine's process: say what you have counted."""

    number: int


@dataclass(frozen=True)
class Drain:
    """Engine's process: take no more connections, finish what is here, end. now: do not finish it."""

    now: bool = False


class Channel(asyncio.Protocol):
    """One end. on_message is called with each message; on_close once, when the other end is gone; neither before whoever opens
    the channel has it."""

    def __init__(self, on_message: Callable[[Any], None], on_close: Callable[[], None]) -> None:
        self._on_message, self._on_close = on_message, on_close
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self._end: socket.socket | None = None
        self._begun = self._lost = False

    @classmethod
    async def open(cls, end: socket.socket, on_message: Callable[[Any], None], on_close: Callable[[], None]) -> Channel:
        """A channel over one end of a socket pair, in the running event loop."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(on_message, on_close), sock=end)
        channel._end = end
        loop.call_soon(channel.begin)  # uvloop may have received something by now
        return channel

    def begin(self) -> None:
        """From now on messages are taken, those that are here already first. What on_message raises ends the channel: here,
        and later by the event loop."""
        self._begun = True
        try:
            self._deliver()
        except BaseException:
            if self._transport is not None:
                self._transport.abort()
            raise
        finally:
            if self._lost:
                self._on_close()

    def send(self, message: Any) -> None:
        """Never waits: what the other end does not take yet is kept. Without effect once the other end is gone."""
        if self._transport is not None and not self._transport.is_closing():
            content = packed(message)
            # uvloop would send it when this turn of its own is over.
            if self._end is not None and not self._transport.get_write_buffer_size():
                content = content[sent_now(self._end, content) :]
            if content:
                self._transport.write(content)

    def close(self) -> None:
        """Ends the channel; what was sent before still arrives."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's says so of itself in no way

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._begun:
            self._deliver()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost = True
        if self._begun:
            self._on_close()

    def _deliver(self) -> None:
        take_messages(self._received, self._on_message)


def sent_now(end: socket.socket, content: bytes | bytearray) -> int:
    """How many bytes the socket took; of a connection that is lost, which the reader will see too, all."""
    try:
        return end.send(content)
    except (BlockingIOError, InterruptedError):
        return 0
    except ConnectionError:
        return len(content)


def packed(message: Any) -> bytes:
    """As it is sent."""
    content = pickle.dumps(_plain(message), pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(_LENGTH, "little") + content


def _plain(message: Any) -> Any:
    """Searches, and what searches found, as tuples: nearly all messages are that. With cold caches, classes take 0.06 ms to
    pickle and 0.05 to make again, tuples a third."""
    if type(message) is Ask and type(message.search) is SearchRequest:
        return _SEARCH, message.number, message.deadline, *message.search.plain()
    if type(message) is Answers and message.status is None:
        found = [(number, *result.plain()) for number, result in message.results if type(result) is SearchResult]
        return (_FOUND, *found) if len(found) == len(message.results) else message
    return message


def _of_plain(message: Any) -> Any:
    if type(message) is not tuple:
        return message
    match message:
        case (kind, number, deadline, *search) if kind == _SEARCH:
            return Ask(number, SearchRequest.of_plain(*search), deadline)
        case (kind, *results) if kind == _FOUND:
            return Answers([(number, SearchResult.of_plain(*found)) for number, *found in results], None)
    return message


def take_messages(received: bytearray, on_message: Callable[[Any], None]) -> None:
    """Calls with each message that is whole, and takes it out; also with the one that on_message fails on."""
    place = 0
    try:
        while len(received) - place >= _LENGTH:
            start = place + _LENGTH
            end = start + int.from_bytes(received[place:start], "little")
            if len(received) < end:
                break
            place = end
            with memoryview(received) as view:
                message = _of_plain(pickle.loads(view[start:end]))
            on_message(message)
    finally:
        del received[:place]


def rehearse(asked: Ask, answers: Answers) -> None:
    """What one end does with both, but for the socket."""
    take_messages(bytearray(packed(asked)), lambda message: None)
    packed(answers)
