"""What a server's start decides and tells about memory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polyrec.core.errors import ConfigError
from polyrec.kvcache.options import KVConfig
from polyrec.kvcache.sizing import KVSize
from polyrec.server import loading
from polyrec.server.loading import served_kv, tell_memory
from polyrec.server.logs import LOGGER, JsonFormatter
from polyrec.server.settings import ServerSettings


def backend(own_memory: bool) -> SimpleNamespace:
    return SimpleNamespace(platform_name="abacus", capabilities=SimpleNamespace(async_copies=own_memory))


@pytest.mark.parametrize(
    ("own_memory", "given", "expected"), [(True, None, 0.9), (False, None, None), (True, 0.4, 0.4), (False, 0.4, 0.4)]
)
def test_a_server_fills_a_device_with_a_memory_of_its_own(
    own_memory: bool, given: float | None, expected: float | None
) -> None:
    kv = KVConfig(memory_fraction=given, max_length=77)
    assert served_kv(kv, backend(own_memory)) == KVConfig(memory_fraction=expected, max_length=77)


@pytest.mark.parametrize(
    ("own_memory", "prefix_cache", "told"),
    [(False, True, "anyway"), (True, False, "without"), (False, False, "without")],
)
def test_a_host_cache_that_nothing_would_use_is_refused(own_memory: bool, prefix_cache: bool, told: str) -> None:
    kv = KVConfig(host_cache_gib=1, prefix_cache=prefix_cache)
    with pytest.raises(ConfigError, match=told) as caught:
        served_kv(kv, backend(own_memory))
    assert caught.value.code == "host_cache_unused"
    served_kv(KVConfig(prefix_cache=prefix_cache), backend(own_memory))
    assert served_kv(KVConfig(host_cache_gib=1), backend(True)).host_cache_gib == 1


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1), ("6400000 100000", 16), (None, 16)],
)
def test_a_container_has_as_many_cores_as_it_may_use_the_time_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cores: int
) -> None:
    monkeypatch.setattr(loading.os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(loading, "_CPU_MAX", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert loading.num_cores() == cores


@pytest.mark.parametrize(
    ("own_memory", "cores", "workers", "may"),
    [(True, 16, 4, True), (True, 15, 4, False), (True, 4, 1, True), (False, 16, 2, False)],
)
def test_workers_stay_awake_where_three_of_four_cores_are_left(
    monkeypatch: pytest.MonkeyPatch, own_memory: bool, cores: int, workers: int, may: bool
) -> None:
    monkeypatch.setattr(loading, "num_cores", lambda: cores)
    monkeypatch.setattr("polyrec.hardware.get_hardware_backend", lambda config: backend(own_memory))
    assert loading.may_stay_awake(ServerSettings(), workers) is may


@pytest.mark.parametrize(
    ("asked", "enabled", "told"),
    [
        (True, True, "on"),
        (False, False, "off"),
        (True, False, "off: the attention cannot go on from a cached beginning"),
    ],
)
def test_one_line_tells_the_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, asked: bool, enabled: bool, told: str
) -> None:
    monkeypatch.setattr(logging.getLogger("polyrec"), "propagate", True)  # a server of this process may have cut it off
    monkeypatch.setattr(logging.getLogger("polyrec"), "level", logging.INFO)
    size = KVSize(1024, 9, 16, torch.float32)
    memory = SimpleNamespace(size=size, prefixes=SimpleNamespace(enabled=enabled))
    engine = SimpleNamespace(memory=memory, graph_bytes=123)
    with caplog.at_level(logging.INFO, LOGGER):
        tell_memory(engine, KVConfig(prefix_cache=asked))  # type: ignore[arg-type]
    [record] = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == f"keys and values: {size}"
    assert "1,024 bytes a token" in line["message"]
    assert (line["prefix_cache"], line["graph_bytes"]) == (told, 123)
