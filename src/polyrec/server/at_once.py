"""Futures whose waiters go on at once, not in the event loop's next turns: each turn looks at the sockets first."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
Done = Callable[[Any], object]  # with the future


class AtOnce(asyncio.Future[T]):
    """Like every future, but for `give`. A task that awaits it goes on as asyncio has it: in its own context, and never while
    another one runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._waiting: list[tuple[Done, contextvars.Context]] = []

    def give(self, result: T) -> None:
        """`set_result`, after which those who waited have gone on already; within a task, just that."""
        if asyncio.current_task(self.get_loop()) is not None:
            self.set_result(result)
            return
        super().set_result(result)
        waiting, self._waiting = self._waiting, []
        for fn, context in waiting:
            context.run(fn, self)

    def add_done_callback(self, fn: Done, /, *, context: contextvars.Context | None = None) -> None:
        """As asyncio's own."""
        if self.done():
            super().add_done_callback(fn, context=context)
        else:
            self._waiting.append((fn, contextvars.copy_context() if context is None else context))

    def remove_done_callback(self, fn: Done, /) -> int:
        """As asyncio's own."""
        kept = [(other, context) for other, context in self._waiting if other != fn]
        removed, self._waiting = len(self._waiting) - len(kept), kept
        return removed + super().remove_done_callback(fn)

    def set_result(self, result: T, /) -> None:
        """As asyncio's own."""
        super().set_result(result)
        self._call_soon()

    def set_exception(self, exception: type | BaseException, /) -> None:
        """As asyncio's own."""
        super().set_exception(exception)
        self._call_soon()

    def cancel(self, msg: Any = None) -> bool:
        """As asyncio's own."""
        cancelled = super().cancel(msg)
        self._call_soon()
        return cancelled

    def _call_soon(self) -> None:
        waiting, self._waiting = self._waiting, []
        for fn, context in waiting:
            super().add_done_callback(fn, context=context)


async def done_within(future: asyncio.Future[Any], seconds: float) -> None:
    """Waits until it is done, or for so long; asyncio.wait takes a turn of the event loop more."""
    if future.done():
        return
    loop = asyncio.get_running_loop()
    waiter: AtOnce[None] = AtOnce(loop)

    def wake(_: object) -> None:
        if not waiter.done():
            waiter.give(None)

    loop.call_later(seconds, wake, None)  # it is not cancelled: an answer would wait for that, and late it does nothing
    future.add_done_callback(wake)
    await waiter
