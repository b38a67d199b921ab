"""Traces of an engine: what runs between start and stop is in them, what runs before is not; files are whole."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import profile

from polyrec.core.errors import ConfigError, RequestError
from polyrec.engine.trace import Tracer
from polyrec.hardware import HardwareConfig, build_hardware_backend

RUNTIME = build_hardware_backend(HardwareConfig(hardware_platform="cpu")).runtime


def names_in(path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]}


def refused(call) -> tuple[str, int]:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.remedy
    return caught.value.code, caught.value.status


def test_a_trace_holds_what_ran_meanwhile(tmp_path):
    folder, tensor = tmp_path / "a" / "b", torch.ones(3)
    tracer = Tracer(RUNTIME, folder)
    tensor.cumsum(0)
    tracer.start()
    tensor.logsumexp(0)
    first = tracer.stop()
    tracer.start()
    tensor.cumprod(0)
    second = tracer.stop()
    assert sorted(folder.iterdir()) == sorted([first, second])  # nothing temporary is left
    assert first.suffix == ".json"
    assert "aten::logsumexp" in names_in(first)
    assert not {"aten::cumsum", "aten::cumprod"} & names_in(first)
    assert "aten::cumprod" in names_in(second)
    assert "aten::logsumexp" not in names_in(second)


def test_one_profile_at_a_time(tmp_path):
    tracer = Tracer(RUNTIME, tmp_path)
    assert refused(tracer.stop) == ("profile_not_running", 409)
    tracer.start()
    assert refused(tracer.start) == ("profile_running", 409)
    assert tracer.stop().is_file()
    assert refused(tracer.stop) == ("profile_not_running", 409)


def test_the_end_writes_what_runs(tmp_path):
    tracer = Tracer(RUNTIME, tmp_path)
    assert tracer.end() is None
    tracer.start()
    assert [tracer.end()] == list(tmp_path.iterdir())
    assert tracer.end() is None


def test_a_folder_that_cannot_be_written_loses_the_trace_and_no_more(tmp_path):
    (tmp_path / "file").touch()
    tracer = Tracer(RUNTIME, tmp_path / "file" / "below")
    tracer.start()
    with pytest.raises(ConfigError) as caught:
        tracer.stop()
    assert caught.value.code == "path_unusable"
    assert refused(tracer.stop) == ("profile_not_running", 409)


@pytest.mark.parametrize(
    ("method", "error"),
    [("stop", RuntimeError("the device is lost")), ("export_chrome_trace", OSError(28, "No space left on device"))],
)
def test_what_torch_and_the_disk_refuse_is_told(tmp_path, monkeypatch, method, error):
    tracer = Tracer(RUNTIME, tmp_path)
    tracer.start()
    profiler = tracer._running

    def refuse(*_):
        raise error

    monkeypatch.setattr(profiler, method, refuse)
    assert refused(tracer.stop) == ("profile_failed", 500)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    if method == "stop":
        profiler.stop()
    tracer.start()
    assert tracer.stop().is_file()


def test_a_profiler_that_does_not_start_is_told(tmp_path, monkeypatch):
    tracer = Tracer(RUNTIME, tmp_path)

    def refuse(_):
        raise RuntimeError("profilers are taken")

    monkeypatch.setattr(profile, "start", refuse)
    assert refused(tracer.start) == ("profile_failed", 500)
    assert refused(tracer.stop) == ("profile_not_running", 409)
