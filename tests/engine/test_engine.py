"""The engine's queue: what a failed batch leaves behind, and limits that no batch could keep."""

from __future__ import annotations

import threading

import pytest

from polyrec.core.config import make_settings
from polyrec.core.errors import ConfigError, RequestError
from polyrec.core.request import RecommendRequest
from polyrec.engine.engine import EngineConfig
from polyrec.engine.loop import EngineLoop
from polyrec.engine.recommender import Recommender
from polyrec.engine.scheduler import BatchLimits
from polyrec.testing.tiny import write_tiny_model

WAIT_S = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("engine") / "tiny", num_items=20, codebook_sizes=(4, 4, 4))


@pytest.fixture
def recommender(folder):
    return Recommender.from_pretrained(folder, config=EngineConfig(limits=BatchLimits(max_tokens=1)))  # each goes alone


def asks(count):
    return [RecommendRequest(history=[f"item-{row}"], n=3) for row in range(count)]


def stop(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["search", "progress"])
def test_a_stopped_call_leaves_nothing_to_the_next_one(recommender, monkeypatch, place):
    expected = recommender.recommend_batch(asks(1))
    if place == "search":
        with monkeypatch.context() as patch:
            patch.setattr(recommender.engine._runner, "run", stop)
            with pytest.raises(KeyboardInterrupt):
                recommender.recommend_batch(asks(7))
    else:
        with pytest.raises(KeyboardInterrupt):
            recommender.recommend_batch(asks(7), stop)
    assert recommender.engine.num_waiting == 0
    served = []
    assert recommender.recommend_batch(asks(1), served.append) == expected
    assert served == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_loop_leaves_nothing_to_the_next_one(recommender, monkeypatch):
    held, real, served = threading.Event(), recommender.engine._runner.run, []

    def broken(batch):
        assert held.wait(WAIT_S)
        served.append(batch)
        if len(served) > 1:  # the first may be all that the loop had collected, after it come all others
            raise ZeroDivisionError("the device is gone")
        return real(batch)

    with monkeypatch.context() as patch:
        patch.setattr(recommender.engine._runner, "run", broken)
        loop = EngineLoop(recommender)
        loop.start()
        futures = [loop.submit(request) for request in asks(7)]
        held.set()
        assert futures[0].result(WAIT_S).items
        for future in futures[1:]:
            with pytest.raises(RequestError) as caught:
                future.result(WAIT_S)
            assert caught.value.code == "engine_failed"
        assert loop.drain(WAIT_S)
    assert recommender.engine.num_waiting == 0
    again = EngineLoop(recommender)
    again.start()
    assert again.submit(asks(1)[0]).result(WAIT_S) == recommender.recommend_batch(asks(1))[0]
    assert again.drain(WAIT_S)


@pytest.mark.parametrize("limit", ["max_requests", "max_tokens", "max_beams"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_that_no_batch_could_keep_are_refused(limit, value):
    with pytest.raises(ConfigError, match=limit):
        make_settings(BatchLimits, {limit: value})
