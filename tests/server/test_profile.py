"""Profiles of a real server: off unless asked for, behind the key, one at a time, and a trace of what ran meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from processes import ServerProcess, metric

from polyrec.core.errors import ConfigError
from polyrec.server.loading import check_start
from polyrec.server.settings import ServerSettings
from polyrec.testing.tiny import write_tiny_model

KEY = {"X-API-Key": "k"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("profiled") / "tiny", num_items=60)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "made" / "here"


@pytest.fixture(scope="module")
def profiled(folder: Path, traces: Path) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "polyrec.cli.main", "serve", str(folder), "--port", "0", "--num-threads", "1"]
    running = ServerProcess([*command, "--profile-dir", str(traces), "--api-key", "k"], OMP_NUM_THREADS="1")
    yield running
    assert running.stop() == 0


@pytest.fixture
def asked(profiled: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=profiled.url, headers=KEY, timeout=60) as open_client:
        yield open_client


def refusal(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert error["remedy"]
    return answer.status_code, error["code"]


def test_a_trace_of_the_engine(asked: httpx.Client, traces: Path) -> None:
    assert list(traces.iterdir()) == []
    assert refusal(asked.post("/v1/profile/stop")) == (409, "profile_not_running")
    assert asked.post("/v1/profile/start").json() == {"running": True, "file": None}
    assert refusal(asked.post("/v1/profile/start")) == (409, "profile_running")
    assert len(asked.post("/v1/recommend", json={"history": ["item-1"], "n": 7}).json()["items"]) == 7
    stopped = asked.post("/v1/profile/stop").json()
    assert stopped["running"] is False
    assert [str(path) for path in traces.iterdir()] == [stopped["file"]]
    events = json.loads(Path(stopped["file"]).read_text(encoding="utf-8"))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"aten::linear", "aten::embedding"} & names, "the operations of the engine's thread are in it"
    assert refusal(asked.post("/v1/profile/stop")) == (409, "profile_not_running")
    counted = 'polyrec_http_requests_total{endpoint="/v1/profile/stop",status="200"}'
    assert metric(asked, counted) == 1


def test_the_second_trace_is_another_file(asked: httpx.Client) -> None:
    files = set()
    for _ in range(2):
        asked.post("/v1/profile/start").raise_for_status()
        asked.post("/v1/recommend", json={"history": ["item-2"]}).raise_for_status()
        files.add(asked.post("/v1/profile/stop").raise_for_status().json()["file"])
    assert len(files) == 2
    assert all(Path(file).is_file() for file in files)


@pytest.mark.parametrize("action", ["start", "stop"])
def test_it_asks_for_the_key(profiled: ServerProcess, action: str) -> None:
    assert refusal(httpx.post(f"{profiled.url}/v1/profile/{action}")) == (401, "api_key_missing")


@pytest.mark.parametrize("action", ["start", "stop"])
def test_without_a_folder_there_are_none(client: httpx.Client, action: str) -> None:
    answer = client.post(f"/v1/profile/{action}")
    assert refusal(answer) == (404, "profile_disabled")
    assert "--profile-dir" in answer.json()["error"]["remedy"]
    assert client.get(f"/v1/profile/{action}").status_code == 405


def test_ending_with_a_profile_that_runs(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrec.cli.main", "serve", str(folder), "--port", "0", "--num-threads", "1"]
    server = ServerProcess([*command, "--profile-dir", str(tmp_path)], OMP_NUM_THREADS="1")
    try:
        httpx.post(f"{server.url}/v1/profile/start", timeout=60).raise_for_status()
        httpx.post(f"{server.url}/v1/recommend", json={"history": ["item-1"]}, timeout=60).raise_for_status()
        server.terminate()
        assert server.process.wait(60) == 0
        [trace] = tmp_path.iterdir()
        assert f'"message": "profile", "file": "{trace}"' in server.errors()
        assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    finally:
        server.stop()


def test_a_folder_that_cannot_be_made_is_told_at_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        check_start(folder, ServerSettings(profile_dir=tmp_path / "file" / "below"))
    assert caught.value.code == "path_unusable"
