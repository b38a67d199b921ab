"""The channels' ends in the engine's process, which two threads read: the event loop's while the engine works, and the engine's
own while it idles. A lone search then passes through no other thread: where threads sleep, that is 0.1 to 0.2 ms each time.

Linux alone has what it takes; elsewhere the event loop reads `Channel`s.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ..core.awake import NEXT_S, give_way
from .channel import packed, sent_now, take_messages

_AT_ONCE = 1 << 16  # bytes; for more, the memory of each read would be mapped and unmapped, 0.02 ms
HAS_LINES = sys.platform == "linux"


class Line:
    """One end, for any thread. on_message is called with each message, by the thread that reads. on_change: called with the
    line when it begins or ends to have something unsent, and when it is closed, since the other end is gone."""

    def __init__(
        self, end: socket.socket, on_message: Callable[[Any], None], on_change: Callable[[Line], None]
    ) -> None:
        end.setblocking(False)
        self._end, self._on_message, self._on_change = end, on_message, on_change
        self.number = end.fileno()
        self._received, self._unsent = bytearray(), bytearray()
        self._reading, self._sending = threading.Lock(), threading.Lock()  # who takes both takes the first one first
        self.is_closed = False

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the other end has read more."""
        return bool(self._unsent)

    def send(self, message: Any) -> None:
        """As `Channel.send`."""
        content = packed(message)
        with self._sending:
            if self.is_closed:
                return
            if self._unsent:
                self._unsent += content
            elif (sent := sent_now(self._end, content)) < len(content):
                self._unsent += content[sent:]
                self._on_change(self)

    def send_rest(self) -> None:
        """Sends as much of what waits as is taken now."""
        with self._sending:
            if not self.is_closed:
                del self._unsent[: sent_now(self._end, self._unsent)]
                if not self._unsent:
                    self._on_change(self)

    def read(self) -> None:
        """Takes the messages that are here. What on_message raises closes the line."""
        with self._reading:
            if self.is_closed:
                return
            is_there = False
            try:
                is_there = self._receive()
                take_messages(self._received, self._on_message)
            except BaseException:
                is_there = False
                raise
            finally:
                if not is_there:
                    self._close()

    def _receive(self) -> bool:
        """Reads all there is; False: there will be no more."""
        while True:
            try:
                data = self._end.recv(_AT_ONCE)
            except (BlockingIOError, InterruptedError):
                return True
            except ConnectionError:
                return False
            self._received += data
            if len(data) < _AT_ONCE:
                return bool(data)

    def _close(self) -> None:
        with self._sending:
            self.is_closed = True
            self._on_change(self)
            self._end.close()


class Lines:
    """All lines of a process. stays_awake: whether the engine's thread may keep a core busy for a lone request, and a moment
    after it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stays_awake: bool) -> None:
        self._loop, self.stays_awake = loop, stays_awake
        self._lines: dict[int, tuple[Line, Callable[[], None]]] = {}
        # Two sets of the same sockets. Out of the one that the event loop watches, the engine's thread takes what there is to
        # read while it idles: else both would wake up.
        self._loops, self._engines = select.epoll(), select.epoll()
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._engines.register(self._bell, select.EPOLLIN)
        self._lock = threading.Lock()
        self._engine_reads = False
        self._awake_until = 0.0
        loop.add_reader(self._loops.fileno(), self._look)

    def open(self, end: socket.socket, on_message: Callable[[Any], None], on_close: Callable[[], None]) -> Line:
        """A line over one end of a socket pair. on_close is called once, by the event loop, when the other end is gone."""
        line = Line(end, on_message, self._changed)
        with self._lock:
            self._lines[line.number] = line, on_close
            self._loops.register(line.number, self._wanted(line))
            self._engines.register(line.number, select.EPOLLIN)
        return line

    def close(self) -> None:
        """Nobody reads any more."""
        self._loop.remove_reader(self._loops.fileno())
        with self._lock:
            for number in self._lines:
                self._engines.unregister(number)
            self._lines.clear()

    # The engine's thread.

    def wait(self, seconds: float, is_work_here: Callable[[], bool], after_lone: Callable[[], None] | None) -> None:
        """Takes the messages that come until there is work, or for `seconds`, and goes on reading them alone until `leave`.
        after_lone: of a lone request, which another may follow at once: `Outside.wait`."""
        if not self._engine_reads:
            self._hand_over(True)
            self._awake_until = 0.0
            if self.stays_awake and after_lone is not None:
                self._awake_until = time.monotonic() + NEXT_S
                after_lone()  # while its client has the answer, and asks again
        if not is_work_here():  # from now on `wake` is heard
            found = self._engines.poll(0)
            while not found and time.monotonic() < self._awake_until:
                give_way()
                found = self._engines.poll(0)
            for number, _ in found or self._engines.poll(seconds):
                if number == self._bell.fileno():
                    self._bell.recv(_AT_ONCE)
                elif (line := self._line(number)) is not None:
                    self._read(line)

    def _read(self, line: Line) -> None:
        try:
            line.read()
        except Exception as error:  # noqa: BLE001 (it is raised again: there, so that this thread goes on)
            self._loop.call_soon_threadsafe(_raise, error)

    def leave(self) -> None:
        """The engine's thread idles no more: the event loop reads."""
        if self._engine_reads:
            self._hand_over(False)

    def wake(self) -> None:
        """Ends a `wait`, from another thread."""
        if self._engine_reads:
            with contextlib.suppress(BlockingIOError):  # it rings already
                self._rope.send(b"!")

    # The event loop's thread.

    def _look(self) -> None:
        for number, event in self._loops.poll(0):
            line = self._line(number)
            if line is not None and event & select.EPOLLOUT:
                line.send_rest()
            if line is not None and event & ~select.EPOLLOUT:
                line.read()

    # Either thread.

    def _line(self, number: int) -> Line | None:
        return found[0] if (found := self._lines.get(number)) is not None else None

    def _hand_over(self, engine_reads: bool) -> None:
        with self._lock:
            self._engine_reads = engine_reads
            for line, _ in self._lines.values():
                self._loops.modify(line.number, self._wanted(line))

    def _changed(self, line: Line) -> None:
        with self._lock:
            if not line.is_closed:
                self._loops.modify(line.number, self._wanted(line))
                return
            if line.number not in self._lines:  # nobody reads any more
                return
            _, on_close = self._lines.pop(line.number)
            self._loops.unregister(line.number)
            self._engines.unregister(line.number)
        self._loop.call_soon_threadsafe(on_close)

    def _wanted(self, line: Line) -> int:
        return (0 if self._engine_reads else select.EPOLLIN) | (select.EPOLLOUT if line.has_unsent else 0)


def _raise(error: Exception) -> None:
    raise error
