"""What cannot be served ends `polyrec serve` with its reason: a model that does not fit the device, before it takes any memory,
and graphs that cannot be recorded."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import WORKERS

from polyrec.attention.sdpa import SdpaAttention
from polyrec.cli.main import main
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware import process as hardware_process
from polyrec.hardware.backends.cpu.graph import CpuGraph
from polyrec.hardware.base.backend import HardwareBackend
from polyrec.hardware.base.graph import capture_failed
from polyrec.hardware.base.runtime import MemoryInfo
from polyrec.models import checkpoint
from polyrec.testing.tiny import write_tiny_model

Backend = Callable[..., HardwareBackend]
PAGE = 16  # tokens
PATIENCE_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("refused") / "tiny", num_items=100)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Makes the CPU with other capabilities this process's hardware, for whoever asks."""
    backend = build_hardware_backend(HardwareConfig())
    monkeypatch.setattr(hardware_process, "_chosen", [(HardwareConfig(), backend)])

    def make(**capabilities: bool) -> HardwareBackend:
        backend.capabilities = replace(backend.capabilities, **capabilities)
        return backend

    return make


def polyrec(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> object:
    """The command in this process -> its exit status."""
    monkeypatch.setattr(sys, "argv", ["polyrec", *map(str, words)])
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # else `main` would set it for the tests that follow
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def bytes_needed(folder: Path, longest: int) -> tuple[int, int]:
    """Of the weights, and of the weights with one longest prompt's keys and values, by the files: all behind safetensors'
    header, the angles' frequencies, which are computed, and a page that no prompt gets."""
    config = json.loads((folder / "config.json").read_text())
    file = (folder / "model.safetensors").read_bytes()
    weights = len(file) - 8 - int.from_bytes(file[:8], "little") + 4 * config["head_dim"] // 2
    pages = -(-longest // PAGE) + 1
    row = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    return weights, weights + pages * PAGE * 2 * row


def words_of(text: str) -> str:
    """The console's lines as one."""
    return " ".join(text.split())


COMMANDS = {
    "serve": ("serve", "--port", "0", "--http-workers", "0", "--max-length", "50", "--memory-fraction", "1"),
    "bench offline": ("bench", "offline", "--case", "h3:4:1", "--requests", "1", "--set", "kv.max_length=50"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("short", [0, 1])
def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    folder: Path,
    chosen: Backend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    short: int,
) -> None:
    """For a byte too little; with that byte loading goes on, to the weights. Until then the file's header alone is read."""
    weights, needed = bytes_needed(folder, longest=50)
    backend, total = chosen(async_copies=True), 10 * needed
    monkeypatch.setattr(backend.runtime, "memory", lambda: MemoryInfo(needed - short, total, 0))
    done, to_empty = [], torch.nn.Module.to_empty

    def read_weights(*given: object) -> None:
        done.append("reads weights")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_tensors", read_weights)
    monkeypatch.setattr(
        torch.nn.Module, "to_empty", lambda *own, **to: done.append("takes memory") or to_empty(*own, **to)
    )
    name, *flags = COMMANDS[command]
    inner = flags[:1] if name == "bench" else []
    status = polyrec(monkeypatch, name, *inner, folder, *flags[len(inner) :])
    told = words_of(capsys.readouterr().err)
    if not short:
        assert (status, done) == (130, ["takes memory", "reads weights"])
        return
    assert (status, done) == (2, [])
    assert "kv_cache_too_small" in told
    assert f"Weights ({weights:,} bytes)" in told
    assert f"of 50 tokens need {needed:,} bytes" in told
    assert f"of the device's {total:,}, {needed - 1:,} are free" in told
    for flag in ("--max-length", "--kv-cache-dtype fp8", "--quantization fp8", "--memory-fraction"):
        assert flag in told


class BrokenGraphs(CpuGraph):
    """Records until it is asked for a shape of this name; what it does then, a platform does."""

    def __init__(self, shape: str, error: Exception) -> None:
        self.shape, self.error, self.num_asked = shape, error, 0

    def capture(self, function: Callable[[], Any], pool: object | None = None) -> Any:
        self.num_asked += 1
        if function.__qualname__ == self.shape:
            raise capture_failed(function, self.error)
        return super().capture(function, pool)


def is_open(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@contextmanager
def ended_after(seconds: float, stopped: threading.Event) -> Iterator[None]:
    """A server that still runs here then is sent SIGTERM, and `stopped` is set."""

    def end() -> None:
        stopped.set()
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.mark.parametrize("http_workers", WORKERS)
@pytest.mark.parametrize(
    ("shape", "error", "code", "remedy"),
    [
        (
            "prefill of 256 tokens",
            RuntimeError("operation not permitted when stream is capturing"),
            "graph_capture_failed",
            "nothing synchronises",
        ),
        (
            "search of 2 requests, 16 beams",
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            "graph_memory_exceeded",
            "Lower --memory-fraction",
        ),
    ],
)
def test_a_graph_that_cannot_be_recorded_ends_the_server(
    folder: Path,
    chosen: Backend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    http_workers: int,
    shape: str,
    error: Exception,
    code: str,
    remedy: str,
) -> None:
    """The first of all, and the last one but a few: with a status that is not 0, what failed and why, and a closed port.
    Nothing that would keep the process is left."""
    monkeypatch.setattr(SdpaAttention, "capturable", True)  # nothing is replayed here
    backend = chosen(captures=True)
    backend.graph = graph = BrokenGraphs(shape, error)
    flags = ("--max-batch", "2", "--max-batch-tokens", "256", "--max-beam-width", "16", "--max-length", "100")
    threads = threading.enumerate()
    stopped = threading.Event()
    with ended_after(PATIENCE_S, stopped):
        status = polyrec(monkeypatch, "serve", folder, "--port", "0", "--http-workers", str(http_workers), *flags)
    assert not stopped.is_set(), "the server stayed"
    output = capsys.readouterr()
    told = words_of(output.err)
    assert status == 2
    assert code in told
    assert f"'{shape}'" in told
    assert f"{type(error).__name__}: {error}" in told
    assert remedy in told
    assert (graph.num_asked == 1) == shape.startswith("prefill")
    lines = [json.loads(line) for line in output.out.splitlines()]
    assert [line["stage"] for line in lines] in ([["loading"]] if http_workers == 0 else [["loading"], []])
    assert not any(is_open(line["url"]) for line in lines)
    assert all(thread.daemon for thread in threading.enumerate() if thread not in threads)
    assert not multiprocessing.active_children()
