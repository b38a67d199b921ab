"""The whole engine on a device: recorded graphs against direct launches and against the CPU's beam search."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyrec.engine.engine import Engine, EngineConfig
from polyrec.engine.graphs import GraphSizes
from polyrec.engine.scheduler import BatchLimits
from polyrec.engine.searches import SearchRequest
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.kvcache.options import KVConfig
from polyrec.models.qwen3 import SPEC
from polyrec.sid.layout import SidLayout
from polyrec.sid.trie import build_trie

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda"),
]

CODES = 64
LAYOUT = SidLayout.contiguous((CODES,) * 3, 100)
SIZES = {
    "vocab_size": 384, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False, "initializer_range": 0.08,
}  # fmt: skip
LIMITS = BatchLimits(max_requests=8)
GRAPHS = GraphSizes(widths=(16, 50, 64), requests=(1, 2, 8), tokens=(64, 512, 2048))


@pytest.fixture(scope="module")
def catalog():
    codes = np.random.default_rng(0).integers(0, CODES, (20_000, 3)).astype(np.int32)
    return np.unique(codes, axis=0)


@pytest.fixture(scope="module")
def engines(catalog):
    """(platform, dtype, graphs) -> an engine; all have the same weights."""
    config = SPEC.read_config(SIZES)
    backends = {name: build_hardware_backend(HardwareConfig(hardware_platform=name)) for name in ("cpu", "nvidia")}
    reference = SPEC.build(config, backends["cpu"].ops)
    reference.init_weights(torch.Generator().manual_seed(1))
    trie = build_trie(catalog)

    def make(platform, dtype=torch.float32, graphs=GRAPHS, **kv):
        backend = backends[platform]
        model = SPEC.build(config, backend.ops)
        model.load_state_dict(reference.state_dict())
        model = model.to(backend.runtime.device, dtype).eval()
        return Engine(model, LAYOUT, trie, backend, EngineConfig(limits=LIMITS, graphs=graphs, kv=KVConfig(**kv)))

    return make


@pytest.fixture(scope="module")
def requests(catalog):
    """Mixed lengths and widths; two with filters."""
    rng = np.random.default_rng(1)

    def prompt(items):
        sids = catalog[rng.integers(0, len(catalog), items)] + np.array(LAYOUT.level_starts)
        edges = [np.full((items, 1), token) for token in (LAYOUT.begin, LAYOUT.end)]
        return np.concatenate([[5, 6], np.hstack([edges[0], sids, edges[1]]).ravel(), [LAYOUT.begin]]).astype(np.int64)

    shapes = [(3, 50), (60, 10), (1, 50), (200, 30), (17, 50), (150, 20)]
    found = [SearchRequest(prompt(items), n, n) for items, n in shapes]
    found.append(SearchRequest(prompt(20), 30, 30, excluded=np.arange(0, len(catalog), 2)))
    found.append(SearchRequest(prompt(20), 30, 30, allowed=np.arange(0, len(catalog), 7)))
    return found


def scores_of(result):
    return dict(zip(result.leaves.tolist(), result.scores.tolist(), strict=True))


def test_recorded_graphs_give_what_direct_launches_give(engines, requests):
    recorded, direct = engines("nvidia", prefix_cache=False), engines("nvidia", graphs=None, prefix_cache=False)
    for found, expected in zip(recorded.run(requests), direct.run(requests), strict=True):
        assert found.leaves.tolist() == expected.leaves.tolist()
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
    before = recorded.num_replays
    recorded.run(requests[:1])
    assert recorded.num_replays == before + 2, "a prefill and a search"
    assert direct.num_replays == 0


def test_fp32_gives_the_cpu_s_items(engines, requests):
    for found, expected in zip(engines("nvidia").run(requests), engines("cpu").run(requests), strict=True):
        ours, theirs = scores_of(found), scores_of(expected)
        # Items whose scores differ by less than rounding may stand in either order, or change places at the end of the list.
        border = min(theirs.values()) + 2e-4
        assert {leaf for leaf, score in theirs.items() if score > border} <= ours.keys()
        for leaf in ours.keys() & theirs.keys():
            assert ours[leaf] == pytest.approx(theirs[leaf], abs=2e-4)


@pytest.mark.parametrize("graphs", [GRAPHS, None], ids=["recorded", "direct"])
def test_users_who_return_get_the_cpu_s_items(engines, requests, graphs):
    """All prompts begin like the longest: most of each is cached, in pages that others wrote."""
    longest = requests[3].prompt[:-1]
    ends = (702, 717, 722, 802, 902)  # an item begins at each
    visits = [SearchRequest(np.append(longest[:end], LAYOUT.begin), 20, 20) for end in ends]
    engine = engines("nvidia", graphs=graphs)
    found = [engine.run([visit])[0] for visit in visits]
    assert engine.memory.prefixes.stats.hit_tokens == sum((end + 1) // 16 * 16 for end in ends[:-1])  # whole pages
    for one, wanted in zip(found, engines("cpu", prefix_cache=False).run(visits), strict=True):
        ours, theirs = scores_of(one), scores_of(wanted)
        border = min(theirs.values()) + 2e-4
        assert {leaf for leaf, score in theirs.items() if score > border} <= ours.keys()
        for leaf in ours.keys() & theirs.keys():
            assert ours[leaf] == pytest.approx(theirs[leaf], abs=2e-4)


def test_keys_and_values_in_fp8_keep_most_items(engines, requests):
    engine = engines("nvidia", torch.bfloat16, kv_cache_dtype="fp8")
    assert engine.memory.size.bytes_per_token == 2 * 4 * 32 * 4
    for found, expected in zip(engine.run(requests), engines("cpu").run(requests), strict=True):
        ours, theirs = scores_of(found), scores_of(expected)
        assert len(ours.keys() & theirs.keys()) >= 0.7 * len(theirs)


def test_a_batch_is_a_prefill_and_a_search_and_nothing_waits_for_the_device(engines, requests):
    """From the choice of a batch to the copies of its results: torch names whatever would wait."""
    engine = engines("nvidia", torch.bfloat16)
    for _ in range(2):
        engine.run(requests[:1])  # its shapes are recorded now, with and without a cached beginning
    done = []
    engine.submit(requests[0], done.append)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine._in_flight = engine._launch(engine._choose())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.step() == 1
    launches = sum(event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch")
    assert launches == 3, "a prefill in two pieces, and a search"
    assert len(done) == 1


def test_bf16_keeps_most_items(engines, requests):
    for found, expected in zip(
        engines("nvidia", torch.bfloat16).run(requests), engines("cpu").run(requests), strict=True
    ):
        ours, theirs = scores_of(found), scores_of(expected)
        assert len(ours.keys() & theirs.keys()) >= 0.8 * len(theirs)
        for leaf in ours.keys() & theirs.keys():
            assert ours[leaf] == pytest.approx(theirs[leaf], abs=0.3)


def test_answers_repeat_bit_for_bit_and_filters_hold(engines, requests, catalog):
    engine = engines("nvidia", torch.bfloat16, prefix_cache=False)
    first = engine.run(requests)
    for _ in range(20):
        for one, other in zip(first, engine.run(requests), strict=True):
            assert np.array_equal(one.leaves, other.leaves)
            assert np.array_equal(one.scores, other.scores)
    assert (first[6].leaves % 2 == 1).all()
    assert (first[7].leaves % 7 == 0).all()
    for result, request in zip(first, requests, strict=True):
        assert len(set(result.leaves.tolist())) == request.n


def test_a_batch_beyond_the_recorded_shapes_runs_all_the_same(engines, requests):
    small = GraphSizes(widths=(16,), requests=(1, 2), tokens=(64,))
    expected = engines("nvidia", prefix_cache=False).run(requests)
    for found, wanted in zip(engines("nvidia", graphs=small, prefix_cache=False).run(requests), expected, strict=True):
        assert found.leaves.tolist() == wanted.leaves.tolist()
