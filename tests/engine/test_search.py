"""The batched search equals a plain beam search over all items of small random catalogs."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import beam_search, random_items, tiny_model

from polyrec.core.request import SCORE_RULES
from polyrec.engine.engine import Engine, EngineConfig
from polyrec.engine.scheduler import BatchLimits
from polyrec.engine.searches import SearchRequest
from polyrec.hardware import get_hardware_backend
from polyrec.models.qwen3 import Qwen3
from polyrec.sid.layout import SidLayout
from polyrec.sid.trie import build_trie


def make_engine(model, layout, codes, rule="level", **limits):
    config = EngineConfig(score_rule=rule, limits=BatchLimits(**limits))
    return Engine(model, layout, build_trie(codes), get_hardware_backend(), config)


def random_prompt(rng, layout, length):
    ids = rng.integers(0, layout.begin, size=length - 1)
    return np.append(ids, layout.begin)


def expect_equal(engine, codes, result, expected, tolerance=2e-4):
    """Same SIDs in the same order, but where float64 says that neighbours differ by rounding only."""
    found = [tuple(codes[engine.trie.rows[leaf]]) for leaf in result.leaves]
    assert len(found) == len(expected)
    assert len(set(found)) == len(found)
    np.testing.assert_allclose(result.scores, [score for _, score in expected], atol=tolerance)
    by_item = dict(expected)
    for sid, score in zip(found, result.scores, strict=True):
        # An item that only rounding put in or out stands at the score of the last place.
        assert abs(by_item.get(sid, expected[-1][1]) - score) < tolerance, sid


@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10_000), depth=st.integers(1, 5), rule=st.sampled_from(SCORE_RULES))
def test_equals_a_plain_beam_search(seed, depth, rule):
    rng = np.random.default_rng(seed)
    sizes = tuple(rng.integers(1, 7, size=depth).tolist())
    layout = SidLayout.contiguous(sizes, int(rng.integers(0, 3)))
    codes = random_items(rng, sizes, int(rng.integers(1, 40)))
    model = tiny_model(layout, seed)
    engine = make_engine(model, layout, codes, rule, max_requests=int(rng.integers(1, 6)))
    requests, items = [], []
    for _ in range(int(rng.integers(1, 5))):  # mixed n, widths, lengths and filters in one batch
        n = int(rng.integers(1, len(codes) + 4))
        leaves = np.arange(len(codes))
        excluded = (
            rng.choice(leaves, int(rng.integers(0, len(codes) + 1)), replace=False) if rng.random() < 0.5 else None
        )
        allowed = (
            rng.choice(leaves, int(rng.integers(1, len(codes) + 1)), replace=False) if rng.random() < 0.4 else None
        )
        legal = set(leaves.tolist())
        legal &= set(allowed.tolist()) if allowed is not None else legal
        legal -= set(excluded.tolist()) if excluded is not None else set()
        items.append({tuple(codes[engine.trie.rows[leaf]].tolist()) for leaf in legal})
        prompt = random_prompt(rng, layout, int(rng.integers(1, 12)))
        requests.append(SearchRequest(prompt, n, n + int(rng.integers(0, 3)), excluded, allowed))
    model64 = copy.deepcopy(model).double()
    for request, legal_items, result in zip(requests, items, engine.run(requests), strict=True):
        expected = beam_search(model64, layout, request.prompt.tolist(), legal_items, request.beam_width, rule)
        expect_equal(engine, codes, result, expected[: request.n])


def test_a_prefill_ends_with_one_row_a_prompt():
    rng = np.random.default_rng(2)
    layout = SidLayout.contiguous((6, 5, 4), 2)
    model = tiny_model(layout, 5)
    engine = make_engine(model, layout, random_items(rng, layout.codebook_sizes, 60))
    sizes = {name: [] for name in ("layers.0.mlp", "layers.1.self_attn", "layers.1.mlp", "norm")}
    for name, seen in sizes.items():
        model.get_submodule(name).register_forward_pre_hook(lambda _, given, seen=seen: seen.append(len(given[0])))
    engine.run([SearchRequest(random_prompt(rng, layout, length), 3, 3) for length in (7, 4, 9)])
    before, after = [20, 9, 9], [3, 9, 9]  # the prefill, and two passes of three beams each
    assert sizes == {"layers.0.mlp": before, "layers.1.self_attn": before, "layers.1.mlp": after, "norm": after}


def test_what_stands_around_the_layers_is_an_operation_each():
    """On a GPU each is one launch, where torch's own calls would be some twenty for a prefill and ten between two passes."""
    rng = np.random.default_rng(3)
    layout = SidLayout.contiguous((6, 5, 4, 3), 2)
    calls = Counter()

    def counted(group, name):
        function = getattr(group, name)

        def count(*arguments):
            calls[name] += 1
            return function(*arguments)

        return dataclasses.replace(group, **{name: count})

    backend = copy.copy(get_hardware_backend())
    ops = backend.ops
    backend.ops = dataclasses.replace(
        ops, rope=counted(ops.rope, "angles"), kv=counted(ops.kv, "locate"), search=counted(ops.search, "next_rows")
    )
    model = Qwen3(tiny_model(layout, 5).config, backend.ops)
    model.init_weights(torch.Generator().manual_seed(5))
    trie = build_trie(random_items(rng, layout.codebook_sizes, 60))
    engine = Engine(model.eval(), layout, trie, backend, EngineConfig())
    engine.run([SearchRequest(random_prompt(rng, layout, length), 3, 3) for length in (7, 4)])
    assert calls == {"locate": 1, "angles": layout.depth, "next_rows": layout.depth - 1}


@pytest.mark.parametrize("rule", SCORE_RULES)
def test_a_wide_beam_ranks_the_whole_catalog(rule):
    rng = np.random.default_rng(1)
    layout = SidLayout.contiguous((6, 5, 4), 2)
    codes = random_items(rng, layout.codebook_sizes, 60)
    model = tiny_model(layout, 5)
    engine = make_engine(model, layout, codes, rule)
    prompt = random_prompt(rng, layout, 7)
    (result,) = engine.run([SearchRequest(prompt, len(codes) + 10, len(codes) + 10)])
    assert sorted(result.leaves.tolist()) == list(range(len(codes)))
    if rule == "children":  # a distribution over the catalog
        assert np.exp(result.scores).sum() == pytest.approx(1, abs=1e-4)


def test_ties_go_to_the_lower_sid():
    layout = SidLayout.contiguous((4, 4), 1)
    codes = np.array([[a, b] for a in (3, 1, 0, 2) for b in (2, 0, 3, 1)])
    model = tiny_model(layout, 0)
    with torch.no_grad():
        model.head_weight.zero_()  # every code is as likely as every other
    engine = make_engine(model, layout, codes)
    (result,) = engine.run([SearchRequest(np.array([layout.begin]), 6, 6)])
    assert codes[engine.trie.rows[result.leaves]].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]


def test_everything_excluded_gives_nothing():
    layout = SidLayout.contiguous((2, 2), 0)
    codes = np.array([[0, 0], [1, 1]])
    engine = make_engine(tiny_model(layout, 1), layout, codes)
    prompt = np.array([layout.begin])
    none, both, empty = engine.run(
        [
            SearchRequest(prompt, 3, 3, excluded=np.arange(2)),
            SearchRequest(prompt, 3, 3),
            SearchRequest(prompt, 3, 3, allowed=np.zeros(0, np.int64)),
        ]
    )
    assert (len(none.leaves), len(both.leaves), len(empty.leaves)) == (0, 2, 0)


def test_an_answer_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(9)
    layout = SidLayout.contiguous((8, 8, 8), 0)
    codes = random_items(rng, layout.codebook_sizes, 200)
    model = tiny_model(layout, 2)
    requests = [SearchRequest(random_prompt(rng, layout, int(rng.integers(1, 60))), n, n) for n in (1, 3, 40, 7)]
    together = make_engine(model, layout, codes).run(requests)
    for request, result in zip(requests, together, strict=True):
        (alone,) = make_engine(model, layout, codes).run([request])
        assert alone.leaves.tolist() == result.leaves.tolist()
        np.testing.assert_allclose(alone.scores, result.scores, atol=1e-5)
