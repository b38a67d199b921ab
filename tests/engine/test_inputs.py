"""What recorded graphs read of a batch: the batch's numbers, and zeros in every place that is nobody's."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyrec.engine.batching import make_batch
from polyrec.engine.inputs import BatchInputs
from polyrec.engine.searches import SearchRequest
from polyrec.hardware import get_hardware_backend
from polyrec.hardware.base.config import HardwareConfig
from polyrec.hardware.ops.search import NodeFilter
from polyrec.kvcache.prefix import Held

PLACES, TOKENS, NODES, LONGEST, PAGE = 4, 64, 20, 56, 8  # an odd number of pages


@pytest.fixture
def inputs():
    runtime = get_hardware_backend(HardwareConfig(device="cpu")).runtime
    return BatchInputs(PLACES, TOKENS, NODES, LONGEST, PAGE, runtime, torch.device("cpu"))


def random_batch(rng, most=PLACES):
    """-> a batch, and each request's prompt, cached tokens, width and pages."""
    parts = []
    for _ in range(rng.integers(1, most + 1)):
        prompt = rng.integers(0, 1000, rng.integers(1, TOKENS // PLACES + 1))
        cached = int(rng.integers(0, len(prompt)) // PAGE * PAGE)
        pages = rng.integers(1, 99, -(-len(prompt) // PAGE)).astype(np.int32)
        parts.append((prompt, cached, int(rng.integers(1, 9)), pages))
    requests = [SearchRequest(prompt, 1, width) for prompt, _, width, _ in parts]
    held = [Held(pages, cached, None, []) for _, cached, _, pages in parts]
    return make_batch(requests, held, PAGE, SimpleNamespace()), parts


def expected_numbers(parts):
    """lengths, cached, widths [places], pages [places, columns], packed tokens."""
    heads, pages = np.zeros((3, PLACES), int), np.zeros((PLACES, LONGEST // PAGE), int)
    for place, (prompt, cached, width, own) in enumerate(parts):
        heads[:, place] = len(prompt) - cached, cached, width
        pages[place, : len(own)] = own
    return *heads, pages, np.concatenate([prompt[cached:] for prompt, cached, _, _ in parts])


def test_each_batch_leaves_nothing_to_the_next(inputs):
    """One stage after the other is filled again, with more or fewer requests and pages."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        batch, parts = random_batch(rng)
        num = len(batch.tokens)
        tokens = int(rng.choice([0, num, TOKENS]))
        before = inputs.token_ids(TOKENS).clone()
        inputs.fill(batch, tokens)
        inputs.launched()
        *heads, pages, packed = expected_numbers(parts)
        for found, wanted in zip((inputs.lengths, inputs.cached, inputs.widths), heads, strict=True):
            assert found.tolist() == wanted.tolist()
        assert inputs.table.pages[:, : LONGEST // PAGE].tolist() == pages.tolist()
        assert not inputs.table.pages[:, LONGEST // PAGE :].any()
        assert torch.equal(inputs.token_ids(tokens)[:num], torch.from_numpy(packed[: tokens and num]))
        unread = TOKENS - tokens
        assert torch.equal(inputs.token_ids(TOKENS)[:unread], before[:unread])


def test_filters_come_and_go(inputs):
    """Places that are nobody's list nothing, and a batch without filters finds none of an earlier one's."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        batch, parts = random_batch(rng)
        counts, allow = np.zeros(PLACES, int), np.zeros(PLACES, int)
        listed = []
        if rng.random() < 0.6:
            num = len(parts)
            counts[:num], allow[:num] = rng.integers(0, NODES // PLACES, num), rng.integers(0, 2, num)
            listed = rng.integers(0, 1000, counts.sum()).tolist()
            found = NodeFilter(*map(torch.tensor, (listed, counts[:num].cumsum(), allow[:num])))
            batch = dataclasses.replace(batch, node_filter=found)
        inputs.fill(batch, 0)
        inputs.launched()
        node_filter = inputs.node_filter(PLACES)
        assert node_filter.ends.tolist() == counts.cumsum().tolist()
        assert node_filter.allow.tolist() == allow.tolist()
        assert node_filter.nodes[: len(listed)].tolist() == listed
        assert inputs.lengths[: len(parts)].tolist() == batch.lengths.tolist()


def test_a_batch_tells_torch_the_same():
    rng = np.random.default_rng(1)
    for _ in range(50):
        batch, parts = random_batch(rng)
        lengths, cached, widths, pages, packed = expected_numbers(parts)
        num, columns = len(parts), batch.table.pages.shape[1]
        assert batch.num_requests == num
        assert batch.lengths.tolist() == lengths[:num].tolist()
        assert batch.prompt_lengths.tolist() == (lengths + cached)[:num].tolist()
        assert batch.widths.tolist() == widths[:num].tolist()
        assert batch.width == widths.max()
        assert batch.table.longest == (lengths + cached).max()
        assert batch.table.pages.tolist() == pages[:num, :columns].tolist()
        assert not pages[:, columns:].any()
        assert (batch.table.cached is None) == (not cached.any())
        assert batch.table.cached is None or batch.table.cached.tolist() == cached[:num].tolist()
        assert batch.token_ids.tolist() == packed.tolist()
        assert batch.node_filter is None


def test_a_rehearsal_writes_beside_what_runs(inputs):
    rng = np.random.default_rng(2)
    batch, _ = random_batch(rng)
    inputs.fill(batch, TOKENS)
    inputs.launched()
    before = [
        part.clone()
        for part in (inputs.lengths, inputs.cached, inputs.widths, inputs.table.pages, inputs.token_ids(TOKENS))
    ]
    for _ in range(5):
        inputs.rehearse(random_batch(rng)[0], TOKENS)
    after = inputs.lengths, inputs.cached, inputs.widths, inputs.table.pages, inputs.token_ids(TOKENS)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
