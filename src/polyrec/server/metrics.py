"""What /metrics shows. One registry per app; the engine's figures are read from its loop when asked. Where several processes
speak HTTP, the one that is asked adds up what all have counted.

docs/server.md lists every metric; a test compares that list with this file's output.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from .. import __version__
from .state import ServerState

ENDPOINTS = (
    "/v1/recommend",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/profile/start",
    "/v1/profile/stop",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
)
_NOTE_S = 0.002
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ENGINE_COUNTERS = (
    ("requests", "polyrec_engine_requests", "Requests the engine finished."),
    ("cancelled", "polyrec_engine_cancelled", "Requests cancelled while they waited."),
    ("expired", "polyrec_engine_expired", "Requests whose time was over while they waited."),
    ("batches", "polyrec_engine_batches", "Batches the engine ran."),
    ("replays", "polyrec_engine_replays", "Recorded graphs the engine replayed."),
    ("unrecorded", "polyrec_engine_unrecorded_batches", "Batches whose search fitted no recorded graph: slow ones."),
    ("prompt_tokens", "polyrec_engine_prompt_tokens", "Tokens of the prompts the engine took."),
    ("hit_tokens", "polyrec_engine_hit_tokens", "Those of them that were cached, so that it did not read them."),
    ("host_hit_tokens", "polyrec_engine_host_hit_tokens", "Those of these that came back from the host's memory."),
    ("evicted_pages", "polyrec_engine_evicted_pages", "Kept pages that left the device."),
    ("stored_pages", "polyrec_engine_stored_pages", "Those of them that went to the host's memory."),
    ("dropped_pages", "polyrec_engine_dropped_pages", "Pages that the host's memory gave up for others."),
    ("busy_seconds", "polyrec_engine_busy_seconds", "Seconds the engine spent on batches."),
)
_ENGINE_GAUGES = (
    ("graph_bytes", "polyrec_engine_graph_bytes", "Device memory of the recorded graphs."),
    ("free_pages", "polyrec_engine_free_pages", "Pages of keys and values that hold nothing."),
    ("kept_pages", "polyrec_engine_kept_pages", "Pages that only the prefix cache keeps."),
    ("used_pages", "polyrec_engine_used_pages", "Pages of prompts that are being answered."),
    ("host_pages", "polyrec_engine_host_pages", "Kept pages in the host's memory."),
)


class ServerMetrics:
    """The counters the routes write, and a collector that reads the engine. pid: the engine's process (None: this one).

    counts_of_others: what other processes of the server have counted; None where there are none.
    """

    def __init__(self, state: ServerState, max_queue: int, pid: int | None = None) -> None:
        self.counts_of_others: Callable[[], Awaitable[list[list[Metric]]]] | None = None
        self._notes: list[Callable[[], None]] = []
        self._engine = CollectorRegistry()
        self._engine.register(_EngineCollector(state, max_queue))
        ProcessCollector(pid=lambda: pid or os.getpid(), registry=self._engine)
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "polyrec_http_requests", "Answered HTTP requests.", ["endpoint", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "polyrec_http_request_seconds",
            "Seconds from a request's arrival to the end of its answer.",
            ["endpoint"],
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.in_flight = Gauge("polyrec_http_requests_in_flight", "Requests not yet answered.", registry=self.registry)
        self.errors = Counter("polyrec_errors", "Refused or failed requests by code.", ["code"], registry=self.registry)
        self.answers = Counter(
            "polyrec_recommendations", "Recommendations by what chose the items.", ["source"], registry=self.registry
        )
        self.items = Counter("polyrec_items_returned", "Items in those recommendations.", registry=self.registry)
        self.unknown_items = Counter(
            "polyrec_unknown_items", "History items not in the catalog, dropped.", registry=self.registry
        )

    def note_later(self, note: Callable[[], None]) -> None:
        """Calls `note`, which counts and logs an answer, in a moment: 0.1 ms that neither that answer nor the request that its
        client sends next waits for. What is counted before that is asked for is complete all the same."""
        self._notes.append(note)
        if len(self._notes) == 1:
            asyncio.get_running_loop().call_later(_NOTE_S, self.settle)

    def settle(self) -> None:
        """Calls the notes that wait; also when the event loop has ended."""
        notes, self._notes = self._notes, []
        for note in notes:
            note()

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Counts one answered request; unknown paths share one label, so a scanner cannot grow the registry."""
        endpoint = path if path in ENDPOINTS else "other"
        self.requests.labels(endpoint, str(status)).inc()
        self.seconds.labels(endpoint).observe(seconds)

    def counted(self) -> list[Metric]:
        """What this process has counted; it can be sent to another one."""
        self.settle()
        return list(self.registry.collect())

    async def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        others = [] if self.counts_of_others is None else await self.counts_of_others()
        shown = CollectorRegistry()
        shown.register(_Families([*added_up([self.counted(), *others]), *self._engine.collect()]))
        return generate_latest(shown)


def added_up(counts: Iterable[Iterable[Metric]]) -> list[Metric]:
    """One family of each name, its samples the sums of those with the same labels; of the times of creation, the earliest."""
    kinds: dict[str, Metric] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (family for families in counts for family in families):
        kinds.setdefault(family.name, family)
        values = sums.setdefault(family.name, {})
        for sample in family.samples:
            key = (sample.name, tuple(sample.labels.items()))
            if sample.name.endswith("_created"):
                values[key] = min(values.get(key, sample.value), sample.value)
            else:
                values[key] = values.get(key, 0.0) + sample.value
    found = []
    for name, first in kinds.items():
        family = Metric(name, first.documentation, first.type)
        for (sample_name, labels), value in sums[name].items():
            family.add_sample(sample_name, dict(labels), value)
        found.append(family)
    return found


class _Families(Collector):
    """Families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:
        """Nothing, as below."""
        return []

    def collect(self) -> list[Metric]:
        """The families."""
        return self._families


class _EngineCollector(Collector):
    """Reads the engine loop's own figures at the moment of asking."""

    def __init__(self, state: ServerState, max_queue: int) -> None:
        self._state = state
        self._max_queue = max_queue

    def describe(self) -> list[Metric]:
        """Nothing: names are known only by collecting, and no other collector uses these."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family per engine figure; before the engine is loaded its counters are 0."""
        service = self._state.service
        info = GaugeMetricFamily("polyrec_build_info", "Always 1; the label tells the version.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        if self._state.facts is not None:
            device = GaugeMetricFamily(
                "polyrec_device_info", "Always 1; the label names the device.", labels=["device"]
            )
            device.add_metric([self._state.facts.device], 1)
            yield device
        yield GaugeMetricFamily("polyrec_ready", "1 when requests are answered.", value=int(self._state.ready))
        depth = service.loop.depth if service else 0
        yield GaugeMetricFamily("polyrec_queue_depth", "Requests waiting for the engine.", value=depth)
        yield GaugeMetricFamily("polyrec_queue_limit", "Requests that may wait (--max-queue).", value=self._max_queue)
        stats = service.loop.stats if service else {}
        for key, name, text in _ENGINE_COUNTERS:
            yield CounterMetricFamily(name, text, value=stats.get(key, 0))
        for key, name, text in _ENGINE_GAUGES:
            yield GaugeMetricFamily(name, text, value=stats.get(key, 0))
