"""The engine's thread: batches, a bounded queue, cancelling, draining, and telling everyone when the engine fails."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest

from polyrec.core.errors import RequestError
from polyrec.core.request import RecommendRequest
from polyrec.engine.engine import EngineConfig
from polyrec.engine.loop import EngineLoop
from polyrec.engine.recommender import Recommender
from polyrec.engine.scheduler import BatchLimits
from polyrec.engine.searches import SearchResult
from polyrec.testing.tiny import write_tiny_model

WAIT_S = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("loop") / "tiny", num_items=60)


@pytest.fixture
def recommender(folder):
    return Recommender.from_pretrained(folder, config=EngineConfig(limits=BatchLimits(max_requests=4)))


@pytest.fixture
def held(recommender):
    """(loop, entered, release): the engine's next step tells `entered` and waits for `release`."""
    entered, release = threading.Event(), threading.Event()
    step = recommender.engine.step

    def slow_step(intake):
        entered.set()
        assert release.wait(WAIT_S)
        return step(intake)

    recommender.engine.step = slow_step
    loop = EngineLoop(recommender, max_queue=3)
    loop.start()
    yield loop, entered, release
    release.set()
    loop.drain(WAIT_S)


def ask(row, n=3, **options):
    return RecommendRequest(history=[f"item-{row}"], n=n, **options)


def test_answers_are_the_recommender_s(folder, recommender):
    loop = EngineLoop(recommender)
    loop.start()
    requests = [ask(row, n=1 + row % 7, exclude_seen=row % 2 == 0) for row in range(30)]
    futures = [loop.submit(request) for request in requests]
    prompt = recommender.prompt_of(np.array([5]), np.array([0]))
    by_prompt = loop.submit_prompt(prompt.tolist(), 3)
    alone = Recommender.from_pretrained(folder)
    for request, future in zip(requests, futures, strict=True):
        assert future.result(WAIT_S).item_ids == alone.recommend_batch([request])[0].item_ids
    assert by_prompt.result(WAIT_S).item_ids == alone.recommend(["item-5"], n=3).item_ids
    assert loop.drain(WAIT_S)
    stats = loop.stats
    assert stats["requests"] == 31
    assert stats["prompt_tokens"] == 31 * len(prompt)
    assert 31 / 4 <= stats["batches"] <= 31
    assert stats["busy_seconds"] > 0
    assert stats["cancelled"] == loop.depth == 0


def test_figures_of_the_prefix_cache(recommender):
    """A user who returns with two items more: the whole pages of what they had are found again."""
    loop = EngineLoop(recommender)
    pages = recommender.engine.memory.size.num_pages - 1
    assert (loop.stats["free_pages"], loop.stats["hit_tokens"]) == (pages, 0)
    loop.start()
    lengths = []
    for num_items in (20, 22):
        request = RecommendRequest(history=[f"item-{row}" for row in range(num_items)], n=3)
        lengths.append(len(recommender.prepare(request).search.prompt))
        loop.submit(request).result(WAIT_S)
    assert loop.drain(WAIT_S)
    stats = loop.stats
    assert 40 < lengths[0] < lengths[1]
    assert stats["prompt_tokens"] == sum(lengths)
    assert stats["hit_tokens"] == (lengths[0] - 1) // 16 * 16  # the first one's end is not in the second
    assert stats["used_pages"] == stats["host_pages"] == stats["host_hit_tokens"] == 0
    assert stats["kept_pages"] == lengths[1] // 16
    assert stats["free_pages"] + stats["kept_pages"] == pages


def test_a_cold_request_does_not_wait_for_the_engine(held):
    loop, entered, _ = held
    loop.submit(ask(1))
    assert entered.wait(WAIT_S)
    assert loop.submit(RecommendRequest(history=[], n=2)).result(0).source == "popularity"


def test_wrong_requests_are_refused_in_the_caller_s_thread(held):
    loop, _, _ = held
    with pytest.raises(RequestError):
        loop.submit(ask(1, n=0))
    with pytest.raises(RequestError):
        loop.submit_prompt([1, 2], 3)
    assert loop.depth == 0


def test_a_full_queue_refuses_with_429(held):
    loop, entered, release = held
    running = loop.submit(ask(0))
    assert entered.wait(WAIT_S)
    waiting = [loop.submit(ask(row)) for row in range(1, 4)]
    assert loop.depth == 3
    with pytest.raises(RequestError) as caught:
        loop.submit(ask(9))
    assert (caught.value.code, caught.value.status) == ("queue_full", 429)
    release.set()
    assert all(len(future.result(WAIT_S).items) == 3 for future in [running, *waiting])
    assert len(loop.submit(ask(9)).result(WAIT_S).items) == 3


def test_a_waiting_request_can_be_cancelled(held):
    loop, entered, release = held
    running = loop.submit(ask(0))
    assert entered.wait(WAIT_S)
    gone, kept = loop.submit(ask(1)), loop.submit(ask(2))
    assert gone.cancel()
    assert not running.cancel()
    release.set()
    assert len(kept.result(WAIT_S).items) == len(running.result(WAIT_S).items) == 3
    with pytest.raises(CancelledError):
        gone.result(WAIT_S)
    assert loop.drain(WAIT_S)
    assert (loop.stats["requests"], loop.stats["cancelled"]) == (2, 1)


def test_draining_serves_who_waits_and_refuses_who_comes(held):
    loop, entered, release = held
    futures = [loop.submit(ask(0))]
    assert entered.wait(WAIT_S)
    futures += [loop.submit(ask(row)) for row in range(1, 4)]
    assert not loop.drain(0.01)  # the engine is held
    with pytest.raises(RequestError) as caught:
        loop.submit(ask(5))
    assert (caught.value.code, caught.value.status) == ("stopping", 503)
    release.set()
    assert loop.drain(WAIT_S)
    assert not loop.is_alive
    assert all(len(future.result(0).items) == 3 for future in futures)


def test_a_loop_that_was_never_started_drains(recommender):
    loop = EngineLoop(recommender)
    assert loop.drain(0)
    with pytest.raises(RequestError):
        loop.submit(ask(1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_engine_tells_everyone_and_stops(recommender):
    entered, release = threading.Event(), threading.Event()

    def broken_step(intake):
        entered.set()
        assert release.wait(WAIT_S)
        raise ZeroDivisionError("the device is gone")

    recommender.engine.step = broken_step
    loop = EngineLoop(recommender)
    loop.start()
    futures = [loop.submit(ask(0))]
    assert entered.wait(WAIT_S)
    futures += [loop.submit(ask(row)) for row in range(1, 8)]  # more than a batch
    futures[4].cancel()
    release.set()
    for future in futures[:4] + futures[5:]:
        with pytest.raises(RequestError) as caught:
            future.result(WAIT_S)
        assert (caught.value.code, caught.value.status) == ("engine_failed", 500)
    assert futures[4].cancelled()
    assert loop.drain(WAIT_S)
    assert not loop.is_alive
    with pytest.raises(RequestError) as caught:
        loop.submit(ask(1))
    assert caught.value.code == "stopping"


def test_requests_racing_with_a_drain_are_answered_or_refused(recommender):
    loop = EngineLoop(recommender, max_queue=1000)
    loop.start()
    futures, refused = [], []
    started = threading.Barrier(4)

    def client():
        started.wait()
        for row in range(40):
            try:
                futures.append(loop.submit(ask(row)))
            except RequestError as error:
                refused.append(error.code)

    threads = [threading.Thread(target=client) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    assert loop.drain(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
    assert len(futures) + len(refused) == 120
    assert set(refused) <= {"stopping"}
    assert all(future.done() and len(future.result(0).items) == 3 for future in futures)


def test_a_call_runs_in_the_engine_s_thread_between_two_batches(held):
    loop, entered, release = held
    running = loop.submit(ask(0))
    assert entered.wait(WAIT_S)
    called, gone = loop.call(threading.get_ident), loop.call(threading.get_ident)
    refused = loop.call(lambda: loop.submit(ask(1, n=0)))
    assert gone.cancel()
    assert not called.done()
    release.set()
    assert called.result(WAIT_S) == loop.call(threading.get_ident).result(WAIT_S) != threading.get_ident()
    with pytest.raises(RequestError):
        refused.result(WAIT_S)
    assert len(running.result(WAIT_S).items) == len(loop.submit(ask(2)).result(WAIT_S).items) == 3


def test_calls_are_made_while_batches_follow_each_other(recommender):
    """A loop that is never idle takes them all the same."""
    loop = EngineLoop(recommender)
    step, called = recommender.engine.step, []

    def step_that_asks_again(intake):
        if not called:
            futures.append(loop.submit(ask(len(futures) % 60)))
        return step(intake)

    recommender.engine.step = step_that_asks_again
    loop.start()
    futures = [loop.submit(ask(0))]
    loop.call(lambda: called.append(len(futures))).result(WAIT_S)
    assert loop.drain(WAIT_S)
    assert called
    assert all(len(future.result(0).items) == 3 for future in futures)


def test_draining_makes_the_calls_that_wait_and_refuses_later_ones(held):
    loop, entered, release = held
    loop.submit(ask(0))
    assert entered.wait(WAIT_S)
    waiting = loop.call(lambda: "called")
    assert not loop.drain(0.01)
    with pytest.raises(RequestError) as caught:
        loop.call(lambda: None)
    assert caught.value.code == "stopping"
    release.set()
    assert loop.drain(WAIT_S)
    assert waiting.result(0) == "called"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_that_is_a_mistake_of_ours_stops_the_loop(recommender):
    loop = EngineLoop(recommender)
    loop.start()
    for future in (loop.call(lambda: 1 / 0), loop.call(lambda: None)):
        with pytest.raises(RequestError) as caught:
            future.result(WAIT_S)
        assert caught.value.code == "engine_failed"
    assert loop.drain(WAIT_S)


def test_a_search_past_its_deadline_is_not_run(held):
    loop, entered, release = held
    front = loop.recommender
    running = loop.search(front.prepare(ask(0)).search, time.monotonic() + WAIT_S)
    assert entered.wait(WAIT_S)
    late = loop.search(front.prepare(ask(1)).search, time.monotonic() - 0.001)
    kept = loop.search(front.prepare(ask(2)).search)
    release.set()
    with pytest.raises(RequestError) as caught:
        late.result(WAIT_S)
    assert (caught.value.code, caught.value.status) == ("deadline_exceeded", 504)
    assert len(running.result(WAIT_S).leaves) == len(kept.result(WAIT_S).leaves) == 3
    assert loop.drain(WAIT_S)
    assert (loop.stats["requests"], loop.stats["expired"]) == (2, 1)


class Brings:
    """Searches that come from outside."""

    def __init__(self, loop, stays_awake=False):
        self.loop, self.told, self.stays_awake = loop, [], stays_awake
        self.searches, self.woken, self.waits = [], threading.Event(), threading.Event()

    def wait(self, seconds, is_work_here, after_lone):
        self.told.append(("wait", after_lone is not None))
        if after_lone is not None and self.stays_awake:
            after_lone()
        self.waits.set()
        if not is_work_here():
            self.woken.wait(WAIT_S)
            self.woken.clear()
            while self.searches:
                self.told.append(self.loop.search(self.searches.pop()))

    def leave(self):
        self.told.append("leave")

    def wake(self):
        self.woken.set()

    def answered(self):
        self.told.append("answered")

    def rehearse(self, search, result):
        self.told.append(("rehearse", search, result))


def test_an_idle_loop_waits_for_searches_from_outside(recommender):
    loop = EngineLoop(recommender)
    outside = Brings(loop)
    loop.attend(outside)
    loop.start()
    assert outside.waits.wait(WAIT_S)
    outside.searches = [recommender.prepare(ask(row)).search for row in (1, 2)]
    outside.wake()
    assert len(loop.submit(ask(3)).result(WAIT_S).items) == 3  # from inside: heard at once
    assert loop.call(threading.get_ident).result(WAIT_S) != threading.get_ident()
    loop.attend(None)
    outside.wake()
    assert len(loop.submit(ask(4)).result(WAIT_S).items) == 3
    loop.attend(outside)
    assert loop.drain(WAIT_S)
    futures = [told for told in outside.told if isinstance(told, Future)]
    assert [len(future.result(0).leaves) for future in futures] == [3, 3]
    assert outside.told[0] == ("wait", False)
    assert outside.told.count("answered") >= 1
    assert outside.told[-1] == "leave"


def test_before_it_works_a_loop_lets_others_read(recommender):
    """Also where work came at the last moment, when `wait` had looked already: else nobody reads until the work is done."""
    loop = EngineLoop(recommender)
    told, search = [], recommender.prepare(ask(1)).search
    step = recommender.engine.step
    recommender.engine.step = lambda intake: told.append("step") or step(intake)

    class LastMoment(Brings):
        def wait(self, seconds, is_work_here, after_lone):
            told.append("wait")
            match told.count("wait"):
                case 1:
                    self.found = loop.search(search)
                case 2:
                    self.called = loop.call(lambda: told.append("call"))
                case _:
                    self.waits.set()
                    self.woken.wait(0.01)

        def leave(self):
            told.append("leave")

        def answered(self):
            pass

    outside = LastMoment(loop)
    loop.attend(outside)
    loop.start()
    assert outside.waits.wait(WAIT_S)
    assert len(outside.found.result(WAIT_S).leaves) == 3
    assert outside.called.result(WAIT_S) is None
    assert loop.drain(WAIT_S)
    for work in ("step", "call"):
        before = told[: told.index(work)]
        assert "leave" in before[len(before) - before[::-1].index("wait") :]


@pytest.mark.parametrize(("stays_awake", "num"), [(True, 1), (True, 2), (False, 1)])
def test_the_thread_does_not_sleep_while_the_device_works_for_one_request(recommender, monkeypatch, stays_awake, num):
    loop, told = EngineLoop(recommender), []
    outside = Brings(loop, stays_awake)
    collect, step = loop._collect, recommender.engine.step

    def awake(seconds, is_over):
        told.append("awake")
        assert 0 < seconds < 0.001, "the rehearsal's time is a part of it"
        for is_done in (False, True):
            monkeypatch.setattr(type(recommender.engine), "is_done", is_done)
            assert is_over() == is_done, "no answer waits for the rest"

    def collected(timeout):
        if timeout is not None:
            told.append(("asleep", timeout))
        return collect(None)

    def stepped(intake):
        if recommender.engine.num_waiting:
            intake(0.001)
            monkeypatch.setattr("polyrec.engine.loop.ANSWER_S", 0)  # the time is over
            intake(0.002)
        return step()

    played = recommender.prepare(ask(9)).search, SearchResult(np.arange(3), np.zeros(3, np.float32))
    monkeypatch.setattr(recommender.engine, "rehearse", lambda: told.append("rehearse") or [played])
    monkeypatch.setattr("polyrec.engine.loop.stay_awake", awake)
    monkeypatch.setattr(loop, "_collect", collected)
    monkeypatch.setattr(recommender.engine, "step", stepped)
    loop.attend(outside)
    outside.searches = [recommender.prepare(ask(row)).search for row in range(1, num + 1)]
    outside.wake()
    loop.start()
    is_lone = num == 1
    while ("wait", is_lone) not in outside.told[1:]:  # which follows the answer
        assert loop.is_alive
    assert [each.done() for each in outside.told if isinstance(each, Future)] == [True] * num
    assert loop.drain(WAIT_S)
    expected = [
        *(["rehearse", "awake"] if stays_awake and is_lone else [("asleep", 0.001)]),
        ("asleep", 0.002),
        *(["rehearse"] if stays_awake and is_lone else []),
    ]
    assert told == expected
    rehearsed = [each[1:] for each in outside.told if isinstance(each, tuple) and each[0] == "rehearse"]
    assert rehearsed == [played] * told.count("rehearse")
    assert (loop.stats["requests"], loop.depth) == (num, 0), "what is rehearsed is not counted"


def test_the_engine_s_thread_works_on_the_process_s_device(recommender, monkeypatch):
    """A thread begins on the first device, and Triton launches where the thread is."""
    entered, run = [], recommender.engine._runner.run
    monkeypatch.setattr(
        type(recommender._backend.runtime), "enter_thread", lambda self: entered.append(threading.get_ident())
    )
    monkeypatch.setattr(
        recommender.engine._runner, "run", lambda batch: entered.append(("run", threading.get_ident())) or run(batch)
    )
    loop = EngineLoop(recommender)
    loop.start()
    loop.submit(ask(3)).result(WAIT_S)
    ident = loop.call(threading.get_ident).result(WAIT_S)
    assert entered[:2] == [ident, ("run", ident)]
    assert loop.drain(WAIT_S)


def test_answers_are_built_in_the_thread_that_asks(recommender):
    """512 names and texts take longer than a launch: the engine's thread must not pay for them."""
    threads = []
    finish = recommender.finish

    def noted(prepared, found):
        threads.append(threading.get_ident())
        return finish(prepared, found)

    recommender.finish = noted
    loop = EngineLoop(recommender)
    loop.start()
    future = loop.submit(ask(1))
    assert len(future.result(WAIT_S).items) == 3
    assert threads == [threading.get_ident()]
    assert loop.drain(WAIT_S)
