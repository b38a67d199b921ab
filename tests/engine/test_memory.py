"""The engine with a paged pool: who returns pays for what is new, nobody gets another's keys, and pages are never lost."""

from __future__ import annotations

import dataclasses
import time
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import random_items, tiny_model

from polyrec.attention.sdpa import PackedPlan, SdpaAttention
from polyrec.core.errors import HardwareError, PolyrecError
from polyrec.engine import search as engine_search
from polyrec.engine.engine import LOOK_SECONDS, Engine, EngineConfig
from polyrec.engine.graphs import GraphRunner, GraphSizes, up_to
from polyrec.engine.inputs import Stage
from polyrec.engine.scheduler import BatchLimits
from polyrec.engine.searches import SearchRequest
from polyrec.hardware import get_hardware_backend
from polyrec.hardware.base.attention import AttentionPlan, HostPlan, PackedLayout
from polyrec.kvcache.options import PAGE_SIZE, KVConfig
from polyrec.sid.layout import SidLayout
from polyrec.sid.trie import build_trie

LAYOUT = SidLayout.contiguous((5, 6, 7), 3)
SIZES = GraphSizes(requests=(1, 2, 4), widths=(4, 8), tokens=(32, 64, 128), rest_tokens=(16, 32))


@pytest.fixture(scope="module")
def parts():
    rng = np.random.default_rng(0)
    return tiny_model(LAYOUT, 0), build_trie(random_items(rng, (5, 6, 7), 60)), get_hardware_backend()


class RealRows(SdpaAttention):
    """Takes rows that belong to no sequence, as a recorded prefill has them, by looking at the values: no device could."""

    capturable = True

    def packed(self, layout, cache=None):
        there, num = layout.lengths > 0, int(layout.lengths.sum())
        table = dataclasses.replace(
            layout.table,
            pages=layout.table.pages[there],
            cached=None if layout.cached is None else layout.cached[there],
        )
        real = PackedLayout(layout.lengths[there], int(layout.lengths.max()), num, table=table)
        return RealPlan(super().packed(real, cache), layout.slots, num)


class RealPlan(AttentionPlan):
    def __init__(self, inner, slots, num):
        self.inner, self.slots, self.num = inner, slots, num

    def target(self, layer):
        return self.inner.target(layer)._replace(slots=self.slots)

    def run(self, layer, query, key, value):
        raise AssertionError("keys and values are written by whoever rotates them")

    def run_written(self, layer, *rows):
        out = self.inner.run_written(layer, *(part[: self.num] for part in rows))
        return torch.nn.functional.pad(out, (0, 0, 0, len(rows[0]) - self.num))


def make_engine(parts, recorded=False, max_requests=4, **kv):
    model, trie, backend = parts
    kv = {"max_length": 120} | kv
    config = EngineConfig(limits=BatchLimits(max_requests=max_requests, max_tokens=256), kv=KVConfig(**kv))
    engine = Engine(model, LAYOUT, trie, backend, config)
    if recorded:  # on the CPU a graph calls its function, so all that is kept between batches can be tested there
        direct = engine._runner
        direct._searcher.attention = RealRows(direct._searcher.attention.needs, backend.ops)
        engine._runner = GraphRunner(
            direct._searcher, backend, SIZES, direct, max_prompt=engine.memory.max_prompt, page_size=PAGE_SIZE
        )
    return engine


def request(tokens, n=4, width=None):
    return SearchRequest(np.append(tokens, LAYOUT.begin).astype(np.int64), n, width or n)


def users(rng, count, longest=100):
    """Prompts of which many begin like another one."""
    base = rng.integers(0, LAYOUT.begin, (3, longest))
    prompts = []
    for _ in range(count):
        own = rng.integers(0, LAYOUT.begin, int(rng.integers(0, 20)))
        prompts.append(np.append(base[rng.integers(3)][: int(rng.integers(0, longest - 20))], own))
    return prompts


def alone(parts, requests):
    """Each by itself, nothing reused."""
    engine = make_engine(parts, prefix_cache=False)
    return [engine.run([one])[0] for one in requests]


def expect_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.scores, other.scores, atol=2e-5)
        differing = one.leaves != other.leaves
        if differing.any():  # neighbours that rounding alone keeps apart
            assert np.diff(other.scores)[max(differing.argmax() - 1, 0)] > -4e-5


@settings(max_examples=10, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000), recorded=st.booleans())
def test_what_is_cached_changes_no_answer(parts, seed, recorded):
    """Batches of any mixture, direct and through recorded shapes, with a pool so small that pages change hands."""
    rng = np.random.default_rng(seed)
    engine = make_engine(parts, recorded)
    requests = [request(tokens, n=int(rng.integers(1, 8))) for tokens in users(rng, 14)]
    expect_same(engine.run(requests), alone(parts, requests))
    assert engine.memory.prefixes.stats.hit_tokens > 0
    assert engine.memory.prefixes.num_used == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recorded", [False, True])
def test_last_rows_that_attend_apart_change_no_answer(parts, seed, recorded, monkeypatch):
    """As those of long prefills do, a prompt of one token among them."""
    rng = np.random.default_rng(seed)
    requests = [request(tokens) for tokens in [*users(rng, 10), np.zeros(0, int)]]
    expected, plans = alone(parts, requests), []
    searcher = engine_search.Searcher
    plan_of_last = searcher._plan_of_last
    monkeypatch.setattr(engine_search, "LAST_ROWS_FROM", 1)
    monkeypatch.setattr(searcher, "_plan_of_last", lambda *given: plans.append(plan_of_last(*given)) or plans[-1])
    expect_same(make_engine(parts, recorded).run(requests), expected)
    assert plans
    assert None not in plans
    make_engine(parts, recorded, kv_cache_dtype="bf16").run(requests)
    assert plans[-1] is None, "its pages hold other keys than the prefill's own"


@pytest.mark.parametrize("longest", [4, PAGE_SIZE, PAGE_SIZE + 1, 40])
def test_prefills_are_recorded_as_of_prompts_that_there_may_be(parts, longest, monkeypatch):
    """Where the sizes are larger than the longest prompt: many short ones share such a prefill."""
    monkeypatch.setattr(engine_search, "LAST_ROWS_FROM", 1)
    engine = make_engine(parts, recorded=True, max_length=longest)
    seen, prefill = [], engine._runner._searcher.prefill
    monkeypatch.setattr(
        engine._runner._searcher,
        "prefill",
        lambda prompts, *rest: seen.append(prompts.layout) or prefill(prompts, *rest),
    )
    graph = engine._runner._backend.graph
    capture = graph.capture
    with monkeypatch.context() as recording:
        recording.setattr(graph, "capture", lambda function, pool: [function(), capture(function, pool)][1])
        engine._runner.record_all()
    assert {layout.num_tokens for layout in seen} == {16, 32, 64, 128}
    assert all(int(layout.prompt_lengths.max()) <= longest for layout in seen)
    assert any(layout.table.all_begun for layout in seen) == (longest > PAGE_SIZE)
    rng = np.random.default_rng(0)
    requests = [request(rng.integers(0, LAYOUT.begin, longest - 1)) for _ in range(4)]
    expect_same(engine.run(requests), alone(parts, requests))


@pytest.mark.parametrize("fp8", [False, True])
def test_attention_quantises_where_the_device_has_e4m3(parts, fp8, monkeypatch):
    """Elsewhere kernels do not know the type, and quantised models run through references."""
    model, _, backend = parts
    monkeypatch.setattr(type(model), "takes_quantized_attention", True)
    monkeypatch.setattr(backend, "capabilities", dataclasses.replace(backend.capabilities, fp8=fp8))
    assert make_engine(parts)._runner._searcher.attention.needs.quantized == fp8


def test_where_a_plan_writes_keys_itself_all_rows_attend(parts, monkeypatch):
    """Attention from elsewhere need not name where keys and values go."""
    rng = np.random.default_rng(0)
    requests = [request(tokens) for tokens in users(rng, 6)]
    expected = alone(parts, requests)
    monkeypatch.setattr(engine_search, "LAST_ROWS_FROM", 1)
    target, run_written = PackedPlan.target, PackedPlan.run_written

    def run(plan, layer, query, key, value):
        plan._ops.write(key, value, *target(plan, layer))
        return run_written(plan, layer, query, key, value)

    monkeypatch.setattr(PackedPlan, "target", lambda plan, layer: None)
    monkeypatch.setattr(PackedPlan, "run_written", lambda *given: pytest.fail("nobody wrote before"))
    monkeypatch.setattr(PackedPlan, "run", run)
    expect_same(make_engine(parts).run(requests), expected)


def test_a_returning_user_pays_for_what_is_new(parts):
    engine = make_engine(parts)
    tokens = np.random.default_rng(1).integers(0, LAYOUT.begin, 100)
    batches, run = [], engine._runner.run
    engine._runner.run = lambda batch: batches.append(batch) or run(batch)
    engine.run([request(tokens[:80])])
    engine.run([request(tokens)])
    assert len(batches[0].token_ids) == 81
    assert len(batches[1].token_ids) == 101 - 80
    assert batches[1].table.cached.tolist() == [80]


def test_prefills_of_returning_users_alone_are_recorded_apart(parts, monkeypatch):
    """And one of them beside somebody new is not."""
    engine = make_engine(parts, recorded=True)
    tables, packed = [], RealRows.packed
    monkeypatch.setattr(RealRows, "packed", lambda *given: tables.append(given[1].table) or packed(*given))
    rng = np.random.default_rng(3)
    known, new = (rng.integers(0, LAYOUT.begin, 40) for _ in range(2))
    longer = [request(np.append(known, rng.integers(0, LAYOUT.begin, 5))) for _ in range(2)]
    expected = alone(parts, [*longer, request(new[:7])])
    engine.run([request(known)])
    for asked, all_begun in (([0], True), ([1, 2], False)):
        found = engine.run([[*longer, request(new[:7])][index] for index in asked])
        expect_same(found, [expected[index] for index in asked])
        assert tables[-1].all_begun == all_begun
        assert tables[-1].cached is not None
    assert [shape for shape in engine._runner._prefills if shape.cached] == [(16, True, True), (32, True, False)]


def test_nothing_is_reused_where_it_is_switched_off(parts):
    engine = make_engine(parts, prefix_cache=False)
    tokens = np.random.default_rng(1).integers(0, LAYOUT.begin, 64)
    for _ in range(2):
        engine.run([request(tokens)])
    assert engine.memory.prefixes.stats.hit_tokens == 0


def test_an_attention_without_prefixes_reuses_none(parts, monkeypatch):
    monkeypatch.setattr(SdpaAttention, "support", type(SdpaAttention.support)(soft_cap=True))
    engine = make_engine(parts)
    tokens = np.random.default_rng(1).integers(0, LAYOUT.begin, 64)
    expect_same(engine.run([request(tokens)] * 2), engine.run([request(tokens)] * 2))
    assert engine.memory.prefixes.stats.hit_tokens == 0


@pytest.mark.parametrize("recorded", [False, True])
def test_recording_touches_no_page_of_a_prompt(parts, recorded):
    """A shape that is recorded in the middle of serving must leave alone what is cached."""
    engine = make_engine(parts, recorded=recorded)
    rng = np.random.default_rng(2)
    known = [rng.integers(0, LAYOUT.begin, 33) for _ in range(3)]
    expected = alone(parts, [request(tokens) for tokens in known])
    engine.run([request(tokens) for tokens in known])
    for length in (5, 20, 40):  # other shapes, recorded now
        engine.run([request(rng.integers(0, LAYOUT.begin, length), n=7)])
    expect_same(engine.run([request(tokens) for tokens in known]), expected)
    assert engine.memory.prefixes.stats.hit_tokens >= 3 * 32


def test_what_the_host_plans_of_a_recorded_prefill_is_renewed_for_each_batch(parts, monkeypatch):
    told = []

    class Told(HostPlan):
        def __init__(self, num_tokens, places):
            self.made = num_tokens, places

        def renew(self, lengths):
            told.append((*self.made, lengths.tolist()))

    monkeypatch.setattr(RealRows, "host_plan", lambda self, *made: Told(*made))
    engine = make_engine(parts, recorded=True)
    rng = np.random.default_rng(3)
    first, second = ([rng.integers(0, LAYOUT.begin, length) for length in lengths] for lengths in ((30, 19), (20, 43)))
    engine.run([request(tokens) for tokens in first])
    assert told == [(64, 4, [64]), (64, 4, [20, 31])], "for the recording, then the batch, shortest first"
    engine.run([request(tokens) for tokens in second])
    assert told[2:] == [(128, 4, [120]), (128, 4, [21, 44])], "no prompt is longer"
    engine.run([request(np.append(second[1], (1, 2)))])  # goes on from what is cached: no host plan
    engine.run([request(rng.integers(0, LAYOUT.begin, 49))])
    assert told[4:] == [(64, 4, [50])]


def test_what_the_host_plans_of_a_recorded_search_is_renewed_for_each_batch(parts, monkeypatch):
    """With whole prompts, cached tokens counted, while the device is at their prefill; the search finds it."""
    told = []

    class Told(HostPlan):
        def __init__(self, table, cache, width):
            self.table, self.cache, self.made = table, cache, (len(table.pages), width)

        def renew(self, lengths):
            told.append((*self.made, lengths.tolist(), (self.table.pages > 0).sum(1).tolist()))

    def checked(self, layout, cache, *, width, num_kept):
        plan = layout.host_plan
        assert (plan.table, plan.cache, plan.made) == (layout.table, cache, (len(layout.lengths), width))
        return search(self, layout, cache, width=width, num_kept=num_kept)

    search = RealRows.search
    monkeypatch.setattr(RealRows, "search", checked)
    monkeypatch.setattr(RealRows, "search_host_plan", lambda self, *given, width: Told(*given, width))
    engine, rng = make_engine(parts, recorded=True), np.random.default_rng(3)
    prefill = engine._runner._prefill
    monkeypatch.setattr(engine._runner, "_prefill", lambda *given: told.append("prefill") or prefill(*given))
    first, second = ([rng.integers(0, LAYOUT.begin, length) for length in lengths] for lengths in ((30, 19), (20, 43)))
    engine.run([request(tokens) for tokens in first])
    assert told == [(2, 4, [1, 1], [0, 0]), "prefill", (2, 4, [20, 31], [2, 2])], "for the recording, then the batch"
    engine.run([request(tokens) for tokens in second])
    assert told[3:] == ["prefill", (2, 4, [21, 44], [2, 3])]
    engine.run([request(np.append(second[1], (1, 2)))])  # goes on from what is cached
    assert told[5:] == [(1, 4, [1], [0]), "prefill", (1, 4, [46], [3])]
    engine.run([request(np.append(tokens, 3), width=8) for tokens in (*first, second[0])])
    assert told[8:] == [(4, 8, [1] * 4, [0] * 4), "prefill", (4, 8, [21, 22, 32], [2, 2, 2, 0])]


def test_a_recorded_prefill_is_split_behind_its_first_layers_and_a_search_is_not(parts, monkeypatch):
    """Once, before the next layer attends; and nothing else comes of it."""
    model, _, backend = parts
    told, rng = [], np.random.default_rng(4)
    prompts = [rng.integers(0, LAYOUT.begin, length) for length in (30, 19)]
    expected = make_engine(parts, recorded=True).run([request(tokens) for tokens in prompts])
    monkeypatch.setattr(engine_search, "FIRST_LAYERS", 1)
    monkeypatch.setattr(type(backend.graph), "split", lambda self: told.append("split"))
    run_written = RealPlan.run_written
    monkeypatch.setattr(
        RealPlan, "run_written", lambda self, layer, *rows: told.append(layer) or run_written(self, layer, *rows)
    )
    found = make_engine(parts, recorded=True).run([request(tokens) for tokens in prompts])
    assert told == [0, "split", *range(1, model.config.num_hidden_layers)]
    assert model.config.num_hidden_layers > 1
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.leaves, other.leaves)
        np.testing.assert_array_equal(one.scores, other.scores)


def test_filtered_searches_are_recorded_too_before_they_are_asked_for(parts, monkeypatch):
    engine, told, captured = make_engine(parts, recorded=True), [], []
    engine.record_graphs(told.append)
    shapes = [f"search of {requests} requests, {width} beams" for requests, width in product((1, 2, 4), (4, 8))]
    assert sorted(one for one in told if one.startswith("search")) == sorted(shapes)
    monkeypatch.setattr(engine._runner._backend.graph, "capture", lambda *arguments: captured.append(arguments))
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, LAYOUT.begin, 20) for _ in range(3)]
    asked = [
        request(prompts[0]),
        request(prompts[1], 8),
        dataclasses.replace(request(prompts[2]), excluded=np.arange(9)),
    ]
    found = engine.run(asked)
    assert not captured
    assert engine.num_unrecorded == 0
    assert not set(found[2].leaves) & set(range(9))
    expect_same(found, alone(parts, asked))


def test_a_batch_that_fits_no_recorded_search_is_counted(parts):
    """Here its filter lists more nodes than the recorded ones have room for."""
    engine = make_engine(parts, recorded=True)
    engine._runner._sizes = SIZES.model_copy(update={"filter_nodes": 2})
    few, many = (dataclasses.replace(request([1, 2, 3]), excluded=np.arange(count)) for count in (1, 30))
    counts = []
    for one in (few, many, many, few):
        expect_same(engine.run([one]), alone(parts, [one]))
        counts.append(engine.num_unrecorded)
    assert counts == [0, 1, 2, 2]


def test_an_attention_that_no_graph_can_hold_is_refused_where_graphs_are_recorded(parts, monkeypatch):
    """And not where batches are to be launched, or nothing is recorded."""
    model, trie, backend = parts
    make_engine(parts).record_graphs()
    monkeypatch.setattr(backend, "capabilities", dataclasses.replace(backend.capabilities, captures=True))
    with pytest.raises(HardwareError, match="attention 'sdpa' cannot be recorded") as caught:
        make_engine(parts).record_graphs()
    assert caught.value.code == "attention_not_recorded"
    assert "--eager" in caught.value.remedy
    eager = EngineConfig(limits=BatchLimits(max_tokens=256), kv=KVConfig(max_length=120), graphs=None)
    Engine(model, LAYOUT, trie, backend, eager).record_graphs()


@pytest.mark.parametrize("recorded", [True, False])
def test_only_what_is_recorded_takes_memory(parts, monkeypatch, recorded):
    """Where nothing is, what others take meanwhile does not count."""
    free = iter((10_000, 7_000))
    engine, told = make_engine(parts, recorded=recorded), []
    monkeypatch.setattr(engine._runtime, "memory", lambda: SimpleNamespace(free=next(free)))
    engine.record_graphs(told.append)
    assert engine.graph_bytes == (3_000 if recorded else 0)
    assert bool(told) == recorded


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, (16,)), (16, (16,)), (17, (16, 32)), (64, (16, 32, 64)), (65, (16, 32, 64))]
)
def test_no_more_is_recorded_than_a_batch_can_hold(limit, expected):
    assert up_to(limit, (16, 32, 64)) == expected


def test_a_failed_batch_gives_its_pages_back(parts, monkeypatch):
    engine = make_engine(parts)
    free = engine.memory.prefixes.num_free

    def broken(batch):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", broken)
        with pytest.raises(KeyboardInterrupt):
            engine.run([request(np.arange(40))])
    assert engine.memory.prefixes.num_free == free
    assert engine.num_waiting == 0


def test_a_batch_that_is_not_waited_for_gives_its_pages_back(parts, monkeypatch):
    """Ctrl-C while the device works: on the batch that is waited for, and on the next one, which is launched already."""

    class Event:
        def synchronize(self):
            raise KeyboardInterrupt

    engine = make_engine(parts, prefix_cache=False, max_requests=1)
    free = engine.memory.prefixes.num_free
    for overlaps in (False, True):
        engine._overlaps = overlaps
        with monkeypatch.context() as patch:
            patch.setattr(engine._runtime, "to_host_async", lambda tensor: (tensor, Event()))
            with pytest.raises(KeyboardInterrupt):
                engine.run([request(np.arange(20))] * 3)
        assert engine.memory.prefixes.num_free == free
        assert engine.num_waiting == 0
    broken = iter((engine._runner.run, lambda batch: stop()))
    monkeypatch.setattr(engine._runner, "run", lambda batch: next(broken)(batch))
    with pytest.raises(KeyboardInterrupt):  # while the next one is launched
        engine.run([request(np.arange(20))] * 3)
    assert engine.memory.prefixes.num_free == free


def stop():
    raise KeyboardInterrupt


class Device:
    """What an engine on the CPU takes for a device that works on while the host does something else, by a clock of its own.

    seconds: that a batch takes. launches: how many requests each batch had.
    """

    def __init__(self, engine, monkeypatch):
        self.now, self.seconds, self.launches, self.ends = 100.0, 0.25, [], 0.0
        launch = engine._launch

        def launch_and_tell(indices):
            if indices:
                self.launches.append(len(indices))
                self.ends = max(self.now, self.ends) + self.seconds
            return launch(indices)

        engine._overlaps = True
        monkeypatch.setattr("polyrec.engine.engine.time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(engine, "_launch", launch_and_tell)
        monkeypatch.setattr(engine._runtime, "to_host_async", lambda tensor: (tensor, Passing(self, self.ends)))

    def wait(self, seconds):
        """An intake in which nobody comes."""
        assert 0 <= seconds <= LOOK_SECONDS
        self.now += seconds


class Passing:
    """The end of a device's batch."""

    def __init__(self, device, at):
        self.device, self.at = device, at

    def query(self):
        return self.device.now >= self.at

    def synchronize(self):
        self.device.now = max(self.device.now, self.at)


@pytest.fixture
def busy(parts, monkeypatch):
    engine = make_engine(parts, prefix_cache=False)
    return engine, Device(engine, monkeypatch)


def some_request(length=20):
    return request(np.random.default_rng(length).integers(0, LAYOUT.begin, length))


def test_who_comes_while_the_device_works_is_launched_when_it_is_nearly_done(busy):
    engine, device = busy
    done, coming, came = [], [some_request(9), some_request(30)], []

    def intake(seconds):
        device.wait(seconds)
        if coming:
            engine.submit(coming.pop(), done.append)
            came.append(device.now)

    engine.submit(some_request(), done.append)
    assert engine.step(device.wait) == 1  # how long a batch takes is known now
    engine.submit(some_request(), done.append)
    began = device.now
    assert engine.step(intake) == 1
    assert device.launches == [1, 1, 2]
    assert came[-1] < began + 0.01
    assert device.now == began + 0.25, "and answered when it is done"
    assert engine._in_flight.launched > began + 0.24
    assert engine.step(device.wait) == 2
    assert (len(done), engine.num_waiting) == (4, 0)


def test_it_knows_when_what_it_waits_for_is_done(busy):
    engine, device = busy
    seen = []

    def intake(seconds):
        seen.append((engine.is_done, device.now >= device.ends))
        device.now += 0.1
        seen.append((engine.is_done, device.now >= device.ends))

    assert engine.is_done
    for _ in range(2):
        engine.submit(some_request(), lambda result: None)
        engine.step(intake)
    assert {done for done, _ in seen} == {False, True}
    assert all(found == is_done for found, is_done in seen)
    assert engine.is_done


def test_a_batch_of_unknown_length_is_waited_for(busy):
    engine, device = busy
    engine.submit(some_request(), lambda result: None)
    assert engine.step(lambda seconds: pytest.fail("waited for requests")) == 1
    assert device.now == 100.25


def test_a_time_that_was_too_long_delays_no_answer_and_is_forgotten(busy):
    engine, device = busy
    device.seconds = 3.0  # once: something was compiled
    took = []
    for _ in range(20):
        engine.submit(some_request(), lambda result: None)
        began = device.now
        assert engine.step(device.wait) == 1
        took.append(device.now - began)
        device.seconds = 0.02
    assert took[0] == 3.0
    assert max(took[1:]) <= 0.02 + LOOK_SECONDS
    rows = len(some_request().prompt) + 2 * 4
    assert engine._pace.due(rows, 1, device.now) < device.now + 0.03


def test_an_idle_device_is_given_half_and_the_other_half_behind_it(busy):
    engine, device = busy
    limits = engine.config.limits.model_copy(update={"filling_rows": 40})
    engine.config = engine.config.model_copy(update={"limits": limits})
    done = []
    for _ in range(2):  # the first time nobody knows how long a half takes
        device.launches.clear()
        for _ in range(4):
            engine.submit(some_request(), done.append)
        assert engine.step(device.wait) == 2
        assert device.launches == [2, 2]
        assert engine.step(device.wait) == 2
    assert len(done) == 8
    device.launches.clear()
    engine.run([some_request() for _ in range(4)])
    assert device.launches == [4], "nobody waits for the first answers alone"


def test_clients_that_ask_again_come_to_leave_no_place_empty(busy):
    """One whom the device works for and three who come meanwhile, of searches recorded for 1, 2 and 4."""
    engine, device = busy
    limits = engine.config.limits.model_copy(update={"filling_rows": 40})
    engine.config = engine.config.model_copy(update={"limits": limits})
    engine._runner.places = (1, 2, 4)
    idle = []

    def ask():
        engine.submit(some_request(), idle.append)

    def intake(seconds):
        device.wait(seconds)
        while idle:
            idle.pop()
            ask()

    for count in (1, 2):  # how long they take is known from now on
        engine.run([some_request()] * count)
    device.launches.clear()
    ask()
    idle[:] = [1] * 3
    for _ in range(6):
        engine.step(intake)
    assert device.launches == [1, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_rehearsal_leaves_no_trace(parts, monkeypatch, recorded):
    """In every look of the intake, and behind the answer; with filters, which it leaves out, and before the first request."""
    engine, rng, found, played = make_engine(parts, recorded), np.random.default_rng(5), [], []
    device, put, batches = Device(engine, monkeypatch), Stage.put, []
    monkeypatch.setattr(Stage, "put", lambda *given, **more: batches.append(1) or put(*given, **more))
    prompts = users(rng, 6)
    requests = [request(tokens) for tokens in [*prompts, *prompts]]
    filtered = dataclasses.replace(requests[0], excluded=np.array([0, 3]))
    expected = alone(parts, [*requests, filtered])
    assert engine.rehearse() == []

    def rehearse():
        before = engine.memory.prefixes.stats, engine.memory.prefixes.num_free, engine.num_waiting
        inputs = engine._runner._inputs._numbers.clone() if recorded else None
        played.extend((asked is waited.request, len(found.leaves)) for asked, found in engine.rehearse())
        assert (engine.memory.prefixes.stats, engine.memory.prefixes.num_free, engine.num_waiting) == before
        assert inputs is None or torch.equal(engine._runner._inputs._numbers, inputs)

    def intake(seconds):
        rehearse()
        device.wait(seconds)

    for asked in [*requests, filtered]:
        engine.submit(asked, found.append)
        waited = engine._waiting[0]
        assert engine.step(intake) == 1
        rehearse()
    expect_same(found, expected)
    assert set(played) == {(True, 4)}
    assert len(batches) > len(found) if recorded else not batches


def test_an_intake_that_fails_gives_all_pages_back(busy):
    engine, device = busy
    free = engine.memory.prefixes.num_free
    engine.submit(some_request(), lambda result: None)
    engine.step(device.wait)

    def intake(seconds):
        raise KeyboardInterrupt

    engine.submit(some_request(), lambda result: None)
    with pytest.raises(KeyboardInterrupt):
        engine.step(intake)
    engine.forget_waiting()
    assert engine.memory.prefixes.num_free == free


def test_a_request_whose_time_is_over_is_not_run(parts, monkeypatch):
    engine = make_engine(parts)
    answers = {}
    engine.submit(request(np.arange(3)), lambda result: answers.__setitem__("late", result), time.monotonic() - 1)
    engine.submit(request(np.arange(3)), lambda result: answers.__setitem__("early", result), time.monotonic() + 60)
    batches, run = [], engine._runner.run
    monkeypatch.setattr(engine._runner, "run", lambda batch: batches.append(batch) or run(batch))
    assert engine.step() == 1
    assert answers["late"] is None
    assert len(answers["early"].leaves) == 4
    assert [len(batch.lengths) for batch in batches] == [1]
    assert engine.step() == 0


def test_a_prompt_that_fits_no_batch_does_not_wait(parts):
    engine = make_engine(parts)
    with pytest.raises(AssertionError):
        engine.run([request(np.zeros(120, int))])
    assert engine.run([request(np.zeros(119, int))])[0].leaves.size == 4


def test_a_length_beyond_the_models_positions_is_refused(parts):
    with pytest.raises(PolyrecError) as caught:
        make_engine(parts, max_length=10**6)
    assert caught.value.code == "max_length_too_long"


def test_half_precision_keys_and_values_move_scores_little(parts):
    requests = [request(tokens) for tokens in users(np.random.default_rng(4), 6)]
    found, expected = make_engine(parts, kv_cache_dtype="bf16").run(requests), alone(parts, requests)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.sort(one.scores), np.sort(other.scores), atol=0.1)
    assert make_engine(parts, kv_cache_dtype="bf16").memory.pool.keys.dtype == torch.bfloat16
