"""An event loop that does not sleep for a moment. A core that slept for some milliseconds takes up to 0.2 ms to wake up, and
then works at half its pace, since its caches are cold."""

from __future__ import annotations

import asyncio
import os
import time

ANSWER_S = 0.05  # the longest wait for the engine's answer that is spent awake
NEXT_S = 0.002  # after an answer: a client that asks again at once does so within this


def give_way() -> None:
    """Lets whoever else waits for this core have it."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()


class Awake:
    """Has the running event loop look at its sockets again and again. Used by the loop's thread alone."""

    def __init__(self) -> None:
        self._until = 0.0
        self._turning = False

    def stay(self, seconds: float) -> None:
        """From now on for so long, whatever was said before. 0: sleep again."""
        self._until = time.monotonic() + seconds
        if not self._turning and seconds > 0:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        if time.monotonic() < self._until:
            give_way()
            asyncio.get_running_loop().call_soon(self._turn)  # with something to call, a loop's look does not wait
        else:
            self._turning = False
