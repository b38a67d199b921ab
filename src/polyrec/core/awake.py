"""When a thread that serves one client may wait without sleeping. A core that slept for some milliseconds takes up to 0.2 ms to
wake up, and then works at half its pace, since its caches are cold. Imports no torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

# Without cpython's change 96078 sched_yield keeps Python's lock. Which releases of 3.10 have it was not looked up.
_LETS_GO = hasattr(os, "sched_yield") and sys.version_info >= (3, 11, 1)
ANSWER_S = 0.05  # the longest wait for the device that is spent awake
NEXT_S = 0.002  # after an answer: a client that asks again at once does so within this


def give_way() -> None:
    """Lets whoever else waits for this core, or for Python's lock, have it."""
    if _LETS_GO:
        os.sched_yield()
    else:
        time.sleep(0)


def stay_awake(seconds: float, is_over: Callable[[], bool]) -> None:
    """Until it is over, or for so many seconds."""
    until = time.monotonic() + seconds
    while not is_over() and time.monotonic() < until:
        give_way()
