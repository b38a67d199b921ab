"""An event loop that does not sleep for a moment; `core.awake` says why."""

from __future__ import annotations

import asyncio
import time

from ..core.awake import give_way


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
