"""When the device will be done with a batch, from how long such batches took: the next one is launched just before. Imports no
torch."""

from __future__ import annotations

# Batches are of one kind if their rows through the model differ by less, and their requests are about as many.
ROWS_OF_A_KIND = 512
NEWEST = 0.3  # weight of the newest observation
EARLIER = 2.0  # launches are begun by so many times their usual time before the device is done, and by the margin,
MARGIN_SECONDS = 1e-3  # since a device that waits is lost, and a batch that is launched early only grows no more


class Pace:
    """Learns from one thread; times are `time.monotonic` seconds."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}
        self._launch_seconds = 0.0
        self._last_end = 0.0

    def launched(self, seconds: float) -> None:
        """A launch kept the host busy so long."""
        self._launch_seconds = mixed(self._launch_seconds or seconds, seconds)

    def finished(self, rows: int, requests: int, launched: float, now: float) -> None:
        """A batch that was launched at `launched` is done."""
        kind, took = kind_of(rows, requests), now - max(launched, self._last_end)
        self._seconds[kind] = mixed(self._seconds.get(kind, took), took)
        self._last_end = now

    def due(self, rows: int, requests: int, launched: float) -> float | None:
        """When the batch behind this one must be launched for the device not to wait; None: no such batch was seen yet."""
        seconds = self._seconds.get(kind_of(rows, requests))
        if seconds is None:
            return None
        return max(launched, self._last_end) + seconds - EARLIER * self._launch_seconds - MARGIN_SECONDS


def kind_of(rows: int, requests: int) -> tuple[int, int]:
    return rows // ROWS_OF_A_KIND, requests.bit_length()


def mixed(known: float, newest: float) -> float:
    return known + NEWEST * (newest - known)
