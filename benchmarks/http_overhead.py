"""What HTTP, tokenising and JSON cost on the host, and how much they hold up the thread that launches the device's work.

A stand-in takes the engine's place: a batch costs 3 ms of launch work on the host (small torch calls with Python between them,
as the real launches are, each of which lets the GIL go for a moment) and then some milliseconds in which the device works and
the thread sleeps. Everything else is the real server with 1.52 million items, asked by 32 clients in other processes that wait
for each answer. Shapes are those of the protocol: 490 items and n 50, 60 and 50, 60 and 512.

Then one client alone: `added_ms` is what its median latency has beyond the stand-in's own time. With workers, that is told
twice: asleep while they wait, as on a machine of few cores, and awake, as beside an accelerator with four cores a worker.

    python benchmarks/http_overhead.py           # five minutes; writes benchmarks/results/http_overhead.json
    python benchmarks/http_overhead.py --quick   # a look; writes nothing

`gil_ms` says how much the engine's thread is held up: the part of a launch in which it neither ran nor waited for a core (Linux
tells both), so that it waited for Python's lock; `late_ms` says the same of going on after the device's end. A small machine,
on which clients and server share cores, stretches `launch_ms`, but not these. Medians, 99th percentiles and means of batches.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from facts import ROOT, origin

LAUNCH_MS = 3.0
CLIENTS, CLIENT_PROCESSES = 32, 2
MAX_BATCH = 32
# items, n, and what a batch of 32 takes on an H200 at the rate aimed at (140, 900 and 300 requests a second)
SHAPES = ((490, 50, 228.0), (60, 50, 35.0), (60, 512, 107.0))
NUM_ITEMS = 1_520_000
LONE_SHAPES = ((490, 50, 10.0), (60, 50, 3.0), (200, 256, 6.0))  # and milliseconds of the device
CODEBOOKS = (8192,) * 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs, nothing written")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2], help="values of --http-workers")
    parser.add_argument("--device", choices=["h200", "none", "both"], default="h200", help="device time of a batch")
    parser.add_argument("--num-items", type=int, default=NUM_ITEMS, help="items of the catalog")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "http_overhead.json")
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "OPTIONS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(Path(args.serve[0]), json.loads(args.serve[1]))
        return
    facts = origin("http_overhead.py", packages=("torch", "numpy", "fastapi", "uvicorn", "pydantic"))
    seconds = 2.0 if args.quick else 5.0
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(Path(name), args.num_items)
        result = {"origin": facts, "stages_us": stages(folder), "served": [], "lone": []}
        for stage in result["stages_us"]:
            print(stage)
        devices = {"h200": [True], "none": [False], "both": [True, False]}[args.device]
        for workers in args.workers:
            for items, n, device_ms in SHAPES:
                for with_device in devices:
                    row = measure(folder, args.num_items, workers, items, n, device_ms if with_device else 0.0, seconds)
                    result["served"].append(row)
                    print(row)
            for items, n, device_ms in LONE_SHAPES:
                for awake in (False, True) if workers else (False,):
                    row = measure(folder, args.num_items, workers, items, n, device_ms, seconds, clients=1, awake=awake)
                    result["lone"].append(row)
                    print(row)
    if not args.quick:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def make_folder(folder: Path, num_items: int = NUM_ITEMS) -> Path:
    """A model folder whose weights are tiny and whose catalog is large."""
    from polyrec.bench import make_model
    from polyrec.hardware import HardwareConfig, get_hardware_backend

    make_model.SHAPES["http"] = make_model.ModelShape(32, 64, 1, 4, 2, 8, 100, CODEBOOKS, num_items)
    make_model.make_model(folder, "http", get_hardware_backend(HardwareConfig(hardware_platform="cpu")))
    return folder


def bodies_of(num_items: int, items: int, n: int, num: int, seed: int) -> list[bytes]:
    rows = np.random.default_rng(seed).integers(0, num_items, (num, items))
    return [json.dumps({"history": [f"item-{row}" for row in line], "n": n}).encode() for line in rows.tolist()]


# The stages of one request, each alone.


def stages(folder: Path) -> list[dict[str, Any]]:
    """Median µs of what a request costs apart from HTTP, one stage after another, and cold: after each call other code ran for
    some milliseconds, and 64 MB were written. send: both messages between a worker and the engine's process."""
    from polyrec.engine.folder import read_folder
    from polyrec.engine.front import EngineFacts, Front
    from polyrec.engine.searches import SearchResult
    from polyrec.server.channel import Answers, Ask, packed, take_messages
    from polyrec.server.schema import encode_answer, parse_recommend

    contents = read_folder(folder)
    num_items = len(contents.catalog)
    facts = EngineFacts("level", 40_000, 30_000, contents.catalog.trie.num_leaves, device="none")
    front = Front.of_folder(contents, facts)
    rng = np.random.default_rng(0)
    rows = []
    for items, n, cold in [(items, n, cold) for items, n, _ in (*SHAPES, LONE_SHAPES[-1]) for cold in (False, True)]:
        bodies = bodies_of(num_items, items, n, 60 if cold else 200, 1)
        requests = [parse_recommend(body, 1024)[0] for body in bodies]
        prepared = [front.prepare(request) for request in requests]
        found = [
            SearchResult(rng.choice(num_items, n, replace=False), -np.sort(rng.random(n, np.float32))) for _ in bodies
        ]
        answers = [front.finish_as_cards(*both) for both in zip(prepared, found, strict=True)]

        def send(both: Any) -> None:
            for message in (Ask(1, both[0].search, 1.0), Answers([(1, both[1])], None)):
                take_messages(bytearray(packed(message)), lambda message: None)

        both = [*zip(prepared, found, strict=True)]
        rows.append(
            {
                "items": items,
                "n": n,
                "cold": cold,
                "parse": median_us(lambda body: parse_recommend(body, 1024), bodies, cold),
                "prepare": median_us(front.prepare, requests, cold),
                "send": median_us(send, both, cold),
                "finish": median_us(lambda both: front.finish_as_cards(*both), both, cold),
                "encode": median_us(lambda answer: encode_answer(answer, request_id="x", timing_ms=1.0), answers, cold),
            }
        )
    return rows


def median_us(function: Callable[[Any], Any], values: Sequence[Any], cold: bool) -> float:
    times = []
    large = np.zeros(64 << 20, np.uint8)
    for value in values:
        if cold:
            disturb(large)
        begin = time.perf_counter()
        function(value)
        times.append(time.perf_counter() - begin)
    return round(1e6 * statistics.median(times), 1)


def disturb(large: np.ndarray) -> None:
    """What other work does to the caches of a core that waits."""
    large[::64] += 1
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    end = time.perf_counter() + 0.003
    while time.perf_counter() < end:
        compile(source, "source", "exec")
        json.dumps(sorted(random.sample(range(2000), 500)))
    large[::64] += 1


# The server with a stand-in for its engine.


class StandIn:
    """The engine's surface, as `EngineLoop` uses it. Two batches may be under way: one runs, one is launched meanwhile."""

    def __init__(self, engine: Any, device_ms: float) -> None:
        import torch

        self.config, self.trie, self.memory = engine.config, engine.trie, engine.memory
        self.num_replays = self.num_unrecorded = self.graph_bytes = 0
        self._waiting: list[tuple[Any, Callable[[Any], None]]] = []
        self._device = device_ms / 1000
        self._free_at = 0.0
        self._flying: tuple[list[Any], float] | None = None
        self._tensor = torch.ones(64)
        self._rounds = 100
        alone = min(self._work() for _ in range(50))
        self._rounds = max(1, round(100 * LAUNCH_MS / 1000 / alone))
        self._rng = np.random.default_rng(0)
        self.launch: list[float] = []
        self.gil: list[float] = []
        self.late: list[float] = []
        self.batch: list[float] = []  # from a launch's begin to the device's end
        self._thread_times: int | None = None
        self.sizes: list[int] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Any, done: Callable[[Any], None], deadline: float | None = None) -> None:
        self._waiting.append((request, done))

    def forget_waiting(self) -> None:
        self._waiting.clear()
        self._flying = None

    def step(self, intake: Any = None) -> int:
        current = self._flying or self._launch()
        if current is None:
            return 0
        self._flying = self._launch() if len(self._waiting) >= MAX_BATCH else None
        batch, end = current
        if (left := end - time.perf_counter()) > 0:
            before = self._on_core_or_queued()
            time.sleep(left)
            # What it ran before it slept is taken off as well: this may be a little too small, never too large.
            self.late.append(max(0.0, time.perf_counter() - end - (self._on_core_or_queued() - before)))
        from polyrec.engine.searches import SearchResult

        for request, done in batch:
            leaves = self._rng.integers(0, self.trie.num_leaves - request.n) + np.arange(request.n)
            done(SearchResult(leaves, -np.sort(self._rng.random(request.n, np.float32))))
        return len(batch)

    def _launch(self) -> tuple[list[Any], float] | None:
        batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        if not batch:
            return None
        before = self._on_core_or_queued()
        took = self._work()
        self.launch.append(took)
        self.gil.append(max(0.0, took - (self._on_core_or_queued() - before)))
        self.sizes.append(len(batch))
        self._free_at = max(self._free_at, time.perf_counter()) + self._device
        self.batch.append(self._free_at - time.perf_counter() + took)
        return batch, self._free_at

    def _on_core_or_queued(self) -> float:
        """Seconds so far in which this thread ran, or could have run had there been a core."""
        if self._thread_times is None:
            self._thread_times = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        ran, queued, _ = os.pread(self._thread_times, 100, 0).split()
        return (int(ran) + int(queued)) / 1e9

    def _work(self) -> float:
        begin = time.perf_counter()
        for number in range(self._rounds):
            self._tensor.add_(number)
            sum(range(200))
        return time.perf_counter() - begin


def serve(folder: Path, options: dict[str, Any]) -> None:
    """A server process; what the stand-in saw is written when it ends."""
    from polyrec.server.launch import run_server
    from polyrec.server.loading import load_service
    from polyrec.server.settings import ServerSettings

    seen: list[StandIn] = []

    def load(folder: Path, settings: ServerSettings, state: Any) -> Any:
        service = load_service(folder, settings, state)
        recommender = service.loop.recommender
        with recommender.lock:
            recommender.engine = StandIn(recommender.engine, options["device_ms"])
        seen.append(recommender.engine)
        return service

    settings = ServerSettings.model_validate(options["settings"])
    run_server(folder, settings, load=load, stays_awake=options["awake"])
    Path(options["report"]).write_text(
        json.dumps({name: getattr(seen[0], name) for name in ("launch", "gil", "late", "batch", "sizes")})
    )


def measure(
    folder: Path,
    num_items: int,
    workers: int,
    items: int,
    n: int,
    device_ms: float,
    seconds: float,
    clients: int = CLIENTS,
    awake: bool = False,
) -> dict[str, Any]:
    """One server, one load. num_items: of the folder's catalog."""
    report = folder / "report.json"
    settings = {"port": 0, "max_batch": MAX_BATCH, "num_threads": 1, "hardware": {"hardware_platform": "cpu"}}
    if workers:
        settings["http_workers"] = workers
    options = json.dumps({"device_ms": device_ms, "settings": settings, "report": str(report), "awake": awake})
    command = [sys.executable, __file__, "--serve", str(folder), options]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["url"]
    assert json.loads(server.stdout.readline())["stage"] == "ready"
    load(url, num_items, items, n, 0.5, clients)  # warms up
    before = cpu_seconds(server.pid)
    found = load(url, num_items, items, n, seconds, clients)
    after = cpu_seconds(server.pid)
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    told = json.loads(report.read_text())
    answered = len(found)
    row = {
        "http_workers": workers,
        "items": items,
        "n": n,
        "device_ms": device_ms,
        "requests_per_second": round(answered / seconds, 1),
        "p50_ms": round(1000 * statistics.median(found), 2),
        "p99_ms": round(1000 * float(np.quantile(found, 0.99)), 2),
        "mean_batch": round(statistics.mean(told["sizes"]), 1),
    }
    if clients == 1:
        own_ms = 1000 * statistics.median(told["batch"])
        row |= {"stays_awake": awake, "engine_ms": round(own_ms, 2), "added_ms": round(row["p50_ms"] - own_ms, 2)}
    for name in ("launch", "gil", "late") if clients > 1 else ():
        if told[name]:
            row[f"{name}_ms"] = {
                "p50": round(1000 * float(np.quantile(told[name], 0.5)), 2),
                "p99": round(1000 * float(np.quantile(told[name], 0.99)), 2),
                "mean": round(1000 * statistics.mean(told[name]), 2),
            }
    own = after[server.pid] - before[server.pid]
    others = sum(after[pid] - before.get(pid, 0.0) for pid in after) - own
    row["cpu_us_per_request"] = {
        "engine_process": round(1e6 * own / answered),
        "http_workers": round(1e6 * others / answered),
    }
    return row


def cpu_seconds(root: int) -> dict[int, float]:
    """CPU seconds of a process and of those it started, by process id (Linux)."""
    found, todo = {}, [root]
    while todo:
        pid = todo.pop()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        for task in Path(f"/proc/{pid}/task").iterdir():
            todo += [int(child) for child in (task / "children").read_text().split()]
    return found


# Clients: as little work as can be, since on a small machine they share the server's cores.


def load(url: str, num_items: int, items: int, n: int, seconds: float, clients: int) -> list[float]:
    """Latencies in seconds of the requests answered by clients that ask again at once."""
    context = multiprocessing.get_context("spawn")
    processes = min(CLIENT_PROCESSES, clients)
    with context.Pool(processes) as pool:
        jobs = [(url, num_items, items, n, seconds, seed, clients // processes) for seed in range(processes)]
        return [latency for part in pool.map(ask_all, jobs) for latency in part]


def ask_all(job: tuple[str, int, int, int, float, int, int]) -> list[float]:
    """One client process: a thread a client, and plain sockets."""
    url, num_items, items, n, seconds, seed, clients = job
    address = (urlsplit(url).hostname, urlsplit(url).port)
    bodies = bodies_of(num_items, items, n, 64, seed)
    head = "POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    messages = [head.format(len(body)).encode() + body for body in bodies]
    latencies: list[float] = []
    refused: list[bytes] = []
    end = time.perf_counter() + seconds

    def client(number: int) -> None:
        with socket.create_connection(address) as connection:
            while (begin := time.perf_counter()) < end:
                connection.sendall(messages[number % len(messages)])
                answer = connection.recv(1 << 16)
                while (gap := answer.find(b"\r\n\r\n")) < 0:
                    answer += connection.recv(1 << 16)
                if not answer.startswith(b"HTTP/1.1 200"):
                    refused.append(answer[:600])
                    return
                fields = answer[:gap].lower()
                left = int(fields[fields.index(b"content-length:") + 15 :].split(b"\r\n")[0]) - (len(answer) - gap - 4)
                while left > 0:
                    left -= len(connection.recv(1 << 16))
                latencies.append(time.perf_counter() - begin)
                number += 7

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if refused:
        raise RuntimeError(f"{len(refused)} answers like {refused[0]!r}")
    return latencies


if __name__ == "__main__":
    main()
