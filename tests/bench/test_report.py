"""Percentiles, origin, table, and what a server tells."""

from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily

from polyrec.bench.report import COMMIT_VARIABLE, commit, line, origin, summary, table
from polyrec.bench.server import samples_of, server_facts


def test_percentiles_are_of_the_latencies_and_the_rate_is_of_the_wall_clock():
    latencies = np.random.default_rng(0).permutation(101) / 1000
    found = summary(latencies, seconds=2.0)
    assert (found["p50_ms"], found["p90_ms"], found["p99_ms"]) == pytest.approx((50, 90, 99))
    assert (found["mean_ms"], found["max_ms"]) == pytest.approx((50, 100))
    assert (found["requests"], found["requests_per_second"]) == (101, 50.5)
    assert summary(latencies, 2.0, 808)["requests_per_second"] == 404


def test_the_origin_says_where_and_what(monkeypatch, tmp_path):
    monkeypatch.setenv(COMMIT_VARIABLE, "abc123")
    monkeypatch.setattr("sys.argv", ["polyrec", "bench", "offline", str(tmp_path / "model"), "--n", "5"])
    found = origin("a device")
    assert (found["commit"], found["machine"]["device"]) == ("abc123", "a device")
    assert found["command"] == "polyrec bench offline model --n 5"
    assert found["machine"]["versions"]["numpy"] == np.__version__


def test_the_commit_is_the_repositorys(monkeypatch):
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    found = commit()
    assert found is None or len(found.rstrip("+")) == 40


def test_tables_align():
    assert table(("a", "long"), [(1, 2.0), (None, 12345.6)]).splitlines() == ["a    long", "1    2.00", "   12,346"]


def test_a_line_says_what_there_is():
    assert line(("a", "b", "long"), (1, None, 2.0)) == "a 1, long 2.00"


def test_a_server_tells_its_device_and_its_graphs_memory():
    name = 'a "fast" {device}\\1, 2'
    info = GaugeMetricFamily("polyrec_device_info", "Always 1.", labels=["device"])
    info.add_metric([name], 1)
    registry = SimpleNamespace(
        collect=lambda: [info, GaugeMetricFamily("polyrec_engine_graph_bytes", "Memory.", value=7)]
    )
    text = generate_latest(registry).decode()
    assert server_facts(samples_of(text)) == {"device": name, "graph_bytes": 7.0}
    assert server_facts({}) == {"device": None, "graph_bytes": None}
