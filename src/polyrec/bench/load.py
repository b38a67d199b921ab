"""Clients over HTTP: several processes, each with threads that ask and wait. Answers are checked after the clock has stopped.

Closed loop: each client asks again as soon as it is answered. Open loop: requests are due at times drawn beforehand, whatever
the server does; a request's latency then counts from when it was due, so that a slow server cannot hide its queue.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..core.errors import PolyrecError
from ..sid.catalog import Catalog
from .cases import fault_of
from .connection import Connection
from .report import summary

T = TypeVar("T")
OPEN_LOOP_THREADS = 256  # requests in flight in one client process, at most


class LoadError(PolyrecError):
    """Clients could not do their part: no server, no answer, a process that ended."""


@dataclass(frozen=True)
class Share:
    """What one client process does. bodies, after `warmup` others that are not timed; n: items that each answer must hold.

    due: seconds after the start at which each body is sent (open loop), else None. catalog: what answers are checked with.
    """

    url: str
    api_key: str | None
    warmup: tuple[bytes, ...]
    bodies: tuple[bytes, ...]
    n: int
    clients: int
    due: tuple[float, ...] | None
    timeout: float
    catalog: Path


@dataclass(frozen=True)
class Outcome:
    """Of one process: perf_counter, which all processes of a machine share, at its first request and its last answer;
    latencies in seconds; what was wrong with answers."""

    began: float
    ended: float
    latencies: tuple[float, ...]
    faults: tuple[str, ...]


def run_load(
    url: str,
    bodies: Sequence[bytes],
    n: int,
    clients: int,
    catalog: Path,
    *,
    warmup: Sequence[bytes] = (),
    rate: float | None = None,
    processes: int = 1,
    api_key: str | None = None,
    timeout: float = 300.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Sends all bodies and returns latencies, requests a second and faults. rate: requests a second of an open loop, in which
    `clients` says nothing. Errors: LoadError."""
    processes = max(1, min(processes, len(bodies), clients if rate is None else processes))
    due = None
    if rate is not None:
        due = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(bodies))).tolist()
    # Each client has as much to ask as the others: else those with more go on alone, and fewer ask than are said to.
    turns = processes if rate is not None else clients
    shares = [
        Share(
            url=url,
            api_key=api_key,
            warmup=tuple(part_of(warmup, place, processes, turns)),
            bodies=tuple(part_of(bodies, place, processes, turns)),
            n=n,
            clients=OPEN_LOOP_THREADS if rate is not None else len(range(place, clients, processes)),
            due=None if due is None else tuple(part_of(due, place, processes, turns)),
            timeout=timeout,
            catalog=catalog,
        )
        for place in range(processes)
    ]
    outcomes = _run_processes(shares)
    latencies = [latency for outcome in outcomes for latency in outcome.latencies]
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    if not latencies:
        raise LoadError("no_answers", f"{url} answered no request: {faults[0]}.", "See the server's log.")
    seconds = max(outcome.ended for outcome in outcomes) - min(outcome.began for outcome in outcomes)
    return {
        **summary(latencies, seconds),
        "seconds": seconds,
        "client_processes": processes,
        "faulty_answers": len(faults),
        "first_fault": faults[0] if faults else None,
    }


def part_of(values: Sequence[T], place: int, processes: int, turns: int) -> list[T]:
    """What one process gets of values that are dealt out in so many turns, each of which belongs to the process of its number
    modulo their number."""
    return [value for number, value in enumerate(values) if number % turns % processes == place]


def _run_processes(shares: list[Share]) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(shares))
    pipes, workers = [], []
    try:
        for share in shares:
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(share, barrier, sender), daemon=True)
            worker.start()
            sender.close()
            pipes.append(receiver)
            workers.append(worker)
        outcomes = []
        for receiver in pipes:
            try:
                outcomes.append(receiver.recv())
            except EOFError:
                raise LoadError("client_failed", "A client process ended early.", "Its error is above.") from None
        return outcomes
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _work(share: Share, barrier: Barrier, sender: Any) -> None:
    """A client process: warm up, wait for the others, run, check, tell."""
    if share.warmup:
        _send_all(share, share.warmup, None)
    barrier.wait()
    began = time.perf_counter()
    answers = _send_all(share, share.bodies, share.due)
    ended = time.perf_counter()
    catalog = Catalog.load(share.catalog)
    faults = [fault for _, status, body in answers if (fault := _fault(status, body, share.n, catalog))]
    latencies = tuple(latency for latency, status, _ in answers if status == 200)
    sender.send(Outcome(began, ended, latencies, tuple(faults)))
    sender.close()


def _send_all(
    share: Share, bodies: Sequence[bytes], due: Sequence[float] | None
) -> list[tuple[float, int | None, bytes]]:
    """(latency, status, answer) of each body; status None: no answer, and why."""
    url = share.url.rstrip("/") + "/v1/recommend"
    numbers = iter(range(len(bodies)))
    lock = threading.Lock()
    answers: list[tuple[float, int | None, bytes]] = []
    idle: list[Connection] = []  # the one used last is taken first, so an open loop opens no more than it needs
    origin = time.perf_counter()

    def ask() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            if due is not None:
                time.sleep(max(0.0, origin + due[number] - time.perf_counter()))
            with lock:
                connection = idle.pop() if idle else Connection(url, share.api_key, share.timeout)
            start = time.perf_counter() if due is None else origin + due[number]
            status, body = connection.ask(bodies[number])
            answers.append((connection.ended - start, status, body))
            idle.append(connection)

    threads = [threading.Thread(target=ask) for _ in range(min(share.clients, len(bodies)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for connection in idle:
        connection.close()
    return answers


def _fault(status: int | None, body: bytes, n: int, catalog: Catalog) -> str | None:
    if status != 200:
        return f"{status or 'no answer'}: {body[:300].decode(errors='replace')}"
    answer = json.loads(body)
    if answer["source"] != "model":
        return f"the answer came from {answer['source']}, not from the model"
    return fault_of([(item["item_id"], item["sid"]) for item in answer["items"]], n, catalog)
