"""Cases against a running server: the histories, the clients, what the server's counters gained, a trace of some requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import Case, Target, body_of, fresh_seed
from .load import run_load
from .server import counters, grown, server_facts, start_profile, stop_profile


@dataclass(frozen=True, eq=False)
class Clients:
    """Who asks: the server's URL, the folder that it serves, how many processes the clients are spread over."""

    url: str
    target: Target
    processes: int
    api_key: str | None = None
    timeout: float = 300.0

    def server(self) -> dict[str, Any]:
        """What the server tells of itself, for the record: `server_facts`."""
        return {"server": server_facts(counters(self.url, self.api_key))}

    def run(self, case: Case, bodies: Sequence[bytes], **options: Any) -> dict[str, Any]:
        """`run_load` for one case, with its facts and the counters' growth."""
        before = counters(self.url, self.api_key)
        found = run_load(
            self.url,
            bodies,
            case.n,
            case.load,
            self.target.path / "catalog.parquet",
            processes=self.processes,
            api_key=self.api_key,
            timeout=self.timeout,
            **options,
        )
        facts = {"tokens": self.target.tokens_of(case.items), "items": case.items, "n": case.n, "clients": case.load}
        return {**facts, **found, "counters": grown(before, counters(self.url, self.api_key))}


def run_case(clients: Clients, case: Case, requests: int, warmup: int, rate: float | None) -> dict[str, Any]:
    """Different histories for every request. warmup: requests of each client before the clock starts."""
    histories = clients.target.histories(requests + warmup * case.load, case.items, fresh_seed())
    bodies = [body_of(history, case.n) for history in histories]
    found = clients.run(case, bodies[:requests], warmup=bodies[requests:], rate=rate)
    return {**found, "rate": rate, "clients": None if rate is not None else case.load}


def write_trace(clients: Clients, case: Case, rate: float | None, path: Path) -> None:
    """A Chrome trace of further requests: three of each client, or a second's worth. The server writes to this machine."""
    requests = 3 * case.load if rate is None else max(3, round(rate))
    bodies = [body_of(history, case.n) for history in clients.target.histories(requests, case.items, fresh_seed())]
    start_profile(clients.url, clients.api_key)
    clients.run(case, bodies, rate=rate)
    stop_profile(clients.url, clients.api_key).replace(path)


def run_returning(clients: Clients, case: Case, users: int, new_items: int) -> dict[str, dict[str, Any]]:
    """Users come once (`first_visit`) and, when all have been, once more with `new_items` further items (`returning`).

    Both at `case.load` clients, who first warm the server up with users who do not come back.
    """
    first = Case(case.items - new_items, case.n, case.load)
    histories = clients.target.histories(users + 2 * case.load, case.items, fresh_seed())
    bodies = [body_of(history[: first.items], case.n) for history in histories]
    warmup = [*bodies[users:], *(body_of(history, case.n) for history in histories[users:])]
    visited = clients.run(first, bodies[:users], warmup=warmup)
    returned = clients.run(case, [body_of(history, case.n) for history in histories[:users]])
    return {"first_visit": visited, "returning": {**returned, "new_items": new_items}}
