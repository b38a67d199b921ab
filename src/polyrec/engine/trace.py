"""Chrome traces (chrome://tracing, Perfetto) of what the engine does, on the host and on the device, from a start to a stop.

torch records the operations of the thread that starts it, so the engine's own thread starts and stops: `EngineLoop.call`.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from torch.profiler import profile

from ..core.errors import RequestError
from ..core.files import atomic_path
from ..hardware.base.runtime import Runtime


class Tracer:
    """Traces one after another. folder: where they are written, made if it is not there."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self._runtime = runtime
        self._folder = folder
        self._running: profile | None = None

    def start(self) -> None:
        """Errors: `profile_running` (409), `profile_failed`."""
        if self._running is not None:
            raise RequestError("profile_running", "A profile is running already.", "Stop it first.", status=409)
        profiler = profile(activities=self._runtime.profiler_activities())
        try:
            profiler.start()
        except RuntimeError as error:
            raise _failed("started", error) from error
        self._running = profiler

    def stop(self) -> Path:
        """Ends the profile; returns the file that holds its trace. Errors: `profile_not_running` (409), `profile_failed`."""
        if self._running is None:
            raise RequestError("profile_not_running", "No profile is running.", "Start one first.", status=409)
        profiler, self._running = self._running, None
        try:
            self._runtime.synchronize()  # what was launched while it ran belongs to it
            profiler.stop()
            moment = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S-%f")
            return export_trace(profiler, self._folder / f"trace-{moment}.json")
        except (RuntimeError, OSError) as error:
            raise _failed("written", error) from error

    def end(self) -> Path | None:
        """Stops the profile if one runs. To be called before the process ends: torch crashes it else."""
        return None if self._running is None else self.stop()


def export_trace(profiler: profile, path: Path) -> Path:
    """Writes what a profiler that has stopped recorded; returns the path."""
    with atomic_path(path) as temporary:
        profiler.export_chrome_trace(str(temporary))
    return path


def _failed(what: str, error: Exception) -> RequestError:
    return RequestError("profile_failed", f"The profile could not be {what}: {error}", "See the message.", status=500)
