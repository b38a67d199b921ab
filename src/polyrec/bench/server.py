"""A server process of our own for the time of a measurement, what its /metrics say, and its profiles."""

from __future__ import annotations

import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from .load import LoadError

STOP_SECONDS = 60.0
_DEVICE = re.compile(r'polyrec_device_info\{device=("(?:[^"\\]|\\.)*")\}')


@contextmanager
def own_server(folder: Path, options: Sequence[str], *, start_seconds: float = 600.0) -> Iterator[tuple[str, float]]:
    """Runs `polyrec serve FOLDER` with these options and yields its URL and the seconds from its start until it was ready.

    Its log goes to our standard error. Errors: LoadError when it ends or is not ready in time.
    """
    command = [sys.executable, "-m", "polyrec.cli.main", "serve", str(folder), "--port", "0", "--log-level", "warning"]
    began = time.perf_counter()
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            url = _wait_ready(process, began + start_seconds)
            yield url, time.perf_counter() - began
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_ready(process: subprocess.Popen[str], deadline: float) -> str:
    assert process.stdout is not None
    stream = process.stdout
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.perf_counter()))
        except queue.Empty:
            raise LoadError(
                "server_slow", "The server was not ready in time.", "Give it longer, or see its log."
            ) from None
        if not line:
            code = process.wait()
            raise LoadError("server_ended", f"The server ended with status {code}.", "Its log is above.")
        told = json.loads(line)
        if told["stage"] == "ready":
            return told["url"]


def counters(url: str, api_key: str | None = None) -> dict[str, float]:
    """Every sample of /metrics, `name{labels}` -> value."""
    return samples_of(_ask(url, "/metrics", api_key))


def samples_of(text: str) -> dict[str, float]:
    """The samples in Prometheus' text format."""
    samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def start_profile(url: str, api_key: str | None = None) -> None:
    """From now on the engine's work is traced; the server must have a --profile-dir."""
    _ask(url, "/v1/profile/start", api_key, "POST")


def stop_profile(url: str, api_key: str | None = None) -> Path:
    """The file, on the server's machine, that holds the trace."""
    return Path(json.loads(_ask(url, "/v1/profile/stop", api_key, "POST"))["file"])


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What Polyrec's own counters (`polyrec_…_total`) gained between two readings; those that stood still are left out."""
    found = {}
    for name, value in after.items():
        bare = name.partition("{")[0]
        if bare.startswith("polyrec_") and bare.endswith("_total") and value != before.get(name, 0.0):
            found[name] = value - before.get(name, 0.0)
    return found


def server_facts(samples: dict[str, float]) -> dict[str, Any]:
    """device: its name, None where the server does not tell. graph_bytes: of its memory, for recorded graphs."""
    devices = (_DEVICE.fullmatch(name) for name in samples)
    return {
        "device": next((json.loads(found[1]) for found in devices if found), None),
        "graph_bytes": samples.get("polyrec_engine_graph_bytes"),
    }


def _ask(url: str, path: str, api_key: str | None, method: str = "GET") -> str:
    request = Request(f"{url.rstrip('/')}{path}", method=method)
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    with urlopen(request, timeout=300) as answer:
        return str(answer.read().decode())
