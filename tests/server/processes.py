"""Starting a server as a process, reading its lines, ending it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
WORKERS = (0, 2)  # HTTP in the engine's process, and in processes of its own: everything is promised for both


class ServerProcess:
    """url: where it listens. Standard error goes to a file, so that the process never waits for a reader."""

    def __init__(self, command: list[str], wait_ready: bool = True, **environment: str) -> None:
        self.stderr = tempfile.NamedTemporaryFile("a")  # noqa: SIM115 - closed by `stop`
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.stderr, text=True, env={**os.environ, **environment}
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server ended with {self.process.wait()}: {self.errors()}"
        self.first_line = json.loads(line)
        self.url = self.first_line["url"]
        if wait_ready:
            ready = self.process.stdout.readline()
            assert ready, f"the server ended with {self.process.wait()}: {self.errors()}"
            assert json.loads(ready) == {"url": self.url, "stage": "ready"}

    def errors(self) -> str:
        """Standard error so far."""
        return Path(self.stderr.name).read_text(encoding="utf-8")

    def logs(self) -> list[dict[str, Any]]:
        """Standard error as log lines, whole ones; fails on a line that is not JSON."""
        return [json.loads(line) for line in self.errors().rpartition("\n")[0].splitlines()]

    def log_of(self, request_id: str) -> dict[str, Any]:
        """The line of one request; it is written after the answer is sent, so this waits for it."""
        found: list[dict[str, Any]] = []

        def seen() -> bool:
            found.extend(line for line in self.logs() if line.get("request_id") == request_id)
            return bool(found)

        eventually(seen, f"a log line of {request_id}")
        return found[0]

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM, then its exit code; a server that does not end in time is killed."""
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()  # type: ignore[union-attr]
            self.stderr.close()


def fake_command(folder: Path, **settings: object) -> list[str]:
    """The command line of a server around the fake engine."""
    return [sys.executable, str(HERE / "fake_engine.py"), str(folder), json.dumps({"port": 0, **settings})]


@contextmanager
def fake_server(folder: Path, wait_ready: bool = True, **settings: object) -> Iterator[ServerProcess]:
    """A server process around the fake engine."""
    server = ServerProcess(fake_command(folder, **settings), wait_ready)
    try:
        yield server
    finally:
        server.stop()


def eventually(condition: object, what: str, seconds: float = 20.0) -> None:
    """Waits until `condition()` is true."""
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


def metric(client: httpx.Client, line: str) -> float:
    """The value of one line of /metrics, given as `name{labels}`; 0 when the line is not there."""
    return metric_in(client.get("/metrics").text, line)


def metric_in(text: str, line: str) -> float:
    """`metric` of what was read already."""
    for each in text.splitlines():
        name, _, value = each.rpartition(" ")
        if name == line:
            return float(value)
    return 0.0
