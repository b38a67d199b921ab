"""How many recorded graphs a server says it has replayed, and how many batches no recorded graph took: after batches of every
kind, against what the graphs themselves have seen."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from polyrec.attention.sdpa import SdpaAttention
from polyrec.core.request import RecommendRequest
from polyrec.engine.engine import EngineConfig
from polyrec.engine.graphs import GraphSizes
from polyrec.engine.loop import EngineLoop
from polyrec.engine.recommender import Recommender
from polyrec.engine.scheduler import BatchLimits
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.attention_choice import PluginAttention
from polyrec.hardware.backends.cpu.graph import CpuCapturedGraph, CpuGraph
from polyrec.kvcache.options import KVConfig
from polyrec.server.metrics import ServerMetrics
from polyrec.testing.tiny import write_tiny_model

WAIT_S = 30
SIZES = GraphSizes(requests=(1, 2), widths=(4, 8), tokens=(16, 32), rest_tokens=(32,), filter_nodes=8)


class SpareRows(SdpaAttention):
    """Rows behind the last sequence are a sequence too, which nobody reads: that needs no look at values, as in a recording."""

    capturable = True

    def packed(self, layout, cache=None):
        if layout.host_lengths is not None:  # launched: all rows are some sequence's
            return super().packed(layout, cache)
        spare = layout.num_tokens - layout.lengths.sum()
        table, cached = layout.table, layout.cached
        table = replace(
            table, pages=pad(table.pages, (0, 0, 0, 1)), cached=None if cached is None else pad(cached, (0, 1))
        )
        return super().packed(replace(layout, lengths=torch.cat([layout.lengths, spare[None]]), table=table), cache)


class NotedGraph(CpuCapturedGraph):
    def __init__(self, function, seen):
        super().__init__(function)
        self._kind, self._seen = function.__qualname__.split()[0], seen

    def replay(self):
        self._seen[self._kind] += 1
        return super().replay()


class NotedGraphs(CpuGraph):
    """Graphs that call, as the CPU's, and count their replays by what was captured."""

    def __init__(self):
        self.seen = Counter()

    def capture(self, function, pool=None):
        return NotedGraph(function, self.seen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("counts") / "tiny", num_items=100)


def serving(folder, *, captures, graphs=SIZES):
    """-> the started loop of an engine whose graphs count for themselves, and those counts."""
    backend = build_hardware_backend(HardwareConfig(hardware_platform="cpu"))
    backend.graph = NotedGraphs()
    backend.capabilities = replace(backend.capabilities, captures=captures)
    plugins = {"own": PluginAttention(SpareRows, "own (a test 1.0)")}
    backend.attention = replace(backend.attention, plugins=plugins, asked="own")
    limits = BatchLimits(max_requests=2, max_tokens=64)
    config = EngineConfig(limits=limits, graphs=graphs, kv=KVConfig(max_length=100))
    loop = EngineLoop(Recommender.from_pretrained(folder, backend=backend, config=config))
    loop.recommender.engine.record_graphs()
    loop.start()
    return loop, backend.graph.seen


def figures(loop):
    """Batches, replays and batches that no recorded graph took, as GET /metrics shows them."""
    state = SimpleNamespace(service=SimpleNamespace(loop=loop), facts=None, ready=True)
    text = asyncio.run(ServerMetrics(state, 1).render()).decode()
    names = ("batches", "replays", "unrecorded_batches")
    return tuple(float(re.search(rf"^polyrec_engine_{name}_total (\S+)$", text, re.M)[1]) for name in names)


def run(loop, *requests):
    """One after another, each a batch by itself; all are counted when this returns."""
    found = [loop.submit(request).result(WAIT_S) for request in requests]
    assert loop.drain(WAIT_S)
    return found


def ask(*rows, **options):
    return RecommendRequest(history=[f"item-{row}" for row in rows], n=4, **options)


SHORT = [ask(row, row + 1) for row in range(5)]  # of 9 tokens at most: a recorded prefill, and a recorded search
LONG = [ask(*range(start, start + 15)) for start in (30, 50, 70)]  # of more than 32: their prefill is launched
RETURNING = ask(*range(30, 45), 99)  # goes on from what is cached of the first of these, in a recorded prefill
FILTERED = ask(3, 4, exclude=["item-1"])
MUCH_FILTERED = ask(
    3, 4, exclude=[f"item-{row}" for row in range(60)]
)  # of more nodes than recorded ones have room for
WIDE = [ask(5, 6, beam_width=width) for width in (8, 9, 20)]  # the last two of more beams than any recorded search


@pytest.mark.parametrize(
    ("requests", "prefills", "searches", "unrecorded"),
    [
        (SHORT, 5, 5, 0),
        (LONG, 0, 3, 0),
        ([LONG[0], RETURNING], 1, 2, 0),
        ([FILTERED, MUCH_FILTERED], 1, 1, 1),
        (WIDE, 1, 1, 2),
        (
            [*SHORT, *LONG[1:], LONG[0], RETURNING, FILTERED, MUCH_FILTERED, *WIDE],
            5 + 0 + 1 + 1 + 1,
            5 + 3 + 1 + 1 + 1,
            3,
        ),
    ],
)
def test_replays_and_batches_that_nothing_was_recorded_for(folder, requests, prefills, searches, unrecorded):
    loop, seen = serving(folder, captures=True)
    assert not seen, "recording replays nothing"
    found = run(loop, *requests)
    assert seen == Counter({"prefill": prefills, "search": searches}) - Counter()
    assert figures(loop) == (len(requests), prefills + searches, unrecorded)
    plain, _ = serving(folder, captures=False)
    assert [one.item_ids for one in found] == [one.item_ids for one in run(plain, *requests)]


def test_where_a_graph_only_calls_each_batch_goes_through_one(folder):
    loop, seen = serving(folder, captures=False)
    run(loop, *SHORT, *LONG)
    assert seen.total() == 8
    assert figures(loop) == (8, 8, 0)


def test_launched_batches_replay_nothing_and_miss_nothing(folder):
    """Under --eager, which records none."""
    loop, seen = serving(folder, captures=True, graphs=None)
    run(loop, *SHORT, *WIDE)
    assert not seen
    assert figures(loop) == (8, 0, 0)
