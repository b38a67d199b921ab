"""benchmarks/http_overhead.py on a small catalog: its stand-in has what the engine's loop asks for, and its stages run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

NUM_ITEMS = 3000


@pytest.fixture(scope="module")
def overhead():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        yield importlib.import_module("http_overhead")


@pytest.fixture(scope="module")
def folder(overhead, tmp_path_factory):
    return overhead.make_folder(tmp_path_factory.mktemp("overhead"), NUM_ITEMS)


def test_a_lone_client_is_answered(overhead, folder):
    found = overhead.measure(folder, NUM_ITEMS, 0, 20, 8, 1.0, 0.5, clients=1)
    assert found["requests_per_second"] > 0
    assert found["mean_batch"] == 1
    assert 0 < found["engine_ms"] < found["p50_ms"]


def test_each_stage_takes_time(overhead, folder, monkeypatch):
    monkeypatch.setattr(overhead, "SHAPES", ((20, 8, 1.0),))
    monkeypatch.setattr(overhead, "disturb", lambda large: None)
    found = overhead.stages(folder)
    assert [(row["n"], row["cold"]) for row in found] == [(8, False), (8, True), (256, False), (256, True)]
    for row in found:
        assert min(row[stage] for stage in ("parse", "prepare", "send", "finish", "encode")) > 0
