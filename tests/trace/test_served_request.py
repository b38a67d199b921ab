"""Walks one served request from the HTTP route to its answer, and compares what is entered with docs/tour.md."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from recorder import documented_files, documented_steps, recording

from polyrec.server.app import create_app
from polyrec.server.loading import load_service
from polyrec.server.settings import ServerSettings
from polyrec.server.state import ServerState
from polyrec.testing.tiny import write_tiny_model

TITLE = "A served request"
DEPTH, LAYERS = 3, 2
PATH = [
    "server/context.py", "server/app.py", "server/waiting.py", "server/schema.py", "engine/front.py",
    "engine/history.py", "data/prompt.py", "engine/loop.py", "engine/loop.py", "engine/engine.py",
    "engine/scheduler.py", "kvcache/prefix.py", "engine/batching.py", "engine/runner.py", "engine/search.py", "models/qwen3.py",
    "layers/attention.py", "attention/sdpa.py", "engine/search.py", "layers/head.py", "engine/batching.py",
    "engine/front.py", "server/schema.py",
]  # fmt: skip


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """One request over HTTP to the real app and engine: the answer, and everything entered for it."""
    folder = write_tiny_model(tmp_path_factory.mktemp("traced") / "model", num_layers=LAYERS)
    settings, state = ServerSettings(), ServerState("traced")
    with recording() as recorder:
        service = load_service(folder, settings, state)
        state.serve(service)
        app = create_app(state, settings)
        asyncio.run(ask(app, {"history": ["item-3"]}))  # what happens once only is over after this
        recorder.active = True
        wait_for_idle_engine(recorder)
        recorder.calls.clear()
        answer = asyncio.run(ask(app, {"history": ["item-1", ["item-2", "nothing"]], "n": 5, "exclude": ["item-9"]}))
        recorder.active = False
        service.loop.drain(10)
    return answer.json(), recorder


async def ask(app, body):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://traced") as client:
        return await client.post("/v1/recommend", json=body)


def wait_for_idle_engine(recorder):
    """The engine's thread may still be ending the request before; while idle it only looks into its queue."""
    end = time.monotonic() + 10
    while ("engine/loop.py", "_collect") not in recorder.calls:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_path_is_the_documented_one(answered):
    answer, recorder = answered
    assert len(answer["items"]) == 5
    assert answer["unknown_items"] == ["nothing"]
    steps = documented_steps(TITLE)
    assert [file for file, _ in steps] == PATH
    assert recorder.first_entries(steps) == steps


def test_every_file_on_the_way_is_documented(answered):
    _, recorder = answered
    entered = {file for file in recorder.files() if not file.startswith("hardware/")}
    assert entered == documented_files(TITLE)


def test_one_prefill_one_pass_a_level_and_one_batch(answered):
    """No decode loop on the host: depth S is a prefill and S − 1 passes inside one replay."""
    _, recorder = answered
    assert recorder.count("engine/runner.py", "run") == 1
    assert recorder.count("engine/search.py", "search") == 1
    assert recorder.count("engine/search.py", "prefill") == 1
    assert recorder.count("engine/search.py", "_pass") == DEPTH - 1
    assert recorder.count("models/qwen3.py", "forward") == DEPTH * (1 + LAYERS), "the model and its layers"
    assert recorder.count("attention/sdpa.py", "run_written") == DEPTH * LAYERS
    assert recorder.count("layers/head.py", "__call__") == DEPTH
    assert recorder.count("hardware/backends/cpu/runtime.py", "to_host") <= 2, "the scores and the leaves"


def test_a_changed_path_is_noticed(answered):
    """The comparison can fail: a step that is left out, or taken in another order, shows."""
    _, recorder = answered
    steps = documented_steps(TITLE)
    without = type(recorder)()
    without.calls = [call for call in recorder.calls if call[0] != "engine/scheduler.py"]
    assert without.first_entries(steps) != steps
    assert without.files() != recorder.files()
    turned = type(recorder)()
    turned.calls = [("engine/runner.py", "run"), *recorder.calls]
    assert turned.first_entries(steps) != steps
