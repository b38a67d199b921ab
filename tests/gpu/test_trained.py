"""bf16 on a device against the CPU's beam search in fp32, on a small model that has learnt something: the same items."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyrec.attention.layout import packed_layout
from polyrec.engine.engine import Engine, EngineConfig
from polyrec.engine.graphs import GraphSizes
from polyrec.engine.scheduler import BatchLimits
from polyrec.engine.searches import SearchRequest
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.models.qwen3 import SPEC
from polyrec.sid.layout import SidLayout
from polyrec.sid.trie import build_trie

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda"),
]

CODES, ITEMS, HISTORY, N = 16, 200, 12, 130
LAYOUT = SidLayout.contiguous((CODES,) * 3, 8)
SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False, "initializer_range": 0.05,
}  # fmt: skip
TOLERANCE = 0.2  # nats; bf16 on a CPU is .14 off at most


class World:
    """Items of random codes; each is mostly followed by its own successor, so there is something to learn."""

    def __init__(self):
        rng = np.random.default_rng(0)
        codes = rng.integers(0, CODES, (2 * ITEMS, 3)).astype(np.int32)
        self.catalog = np.unique(codes, axis=0)[:ITEMS]
        self.successor = rng.permutation(len(self.catalog))

    def histories(self, rng, count):
        items = [rng.integers(0, len(self.catalog), count)]
        for _ in range(HISTORY - 1):
            stray = rng.integers(0, len(self.catalog), count)
            items.append(np.where(rng.random(count) < 0.8, self.successor[items[-1]], stray))
        return np.stack(items, 1)

    def tokens(self, history):
        """int64: each item as its begin token and its codes."""
        codes = self.catalog[history] + np.array(LAYOUT.level_starts)
        begin = np.full((*history.shape, 1), LAYOUT.begin)
        return np.concatenate([begin, codes], -1).reshape(*history.shape[:-1], -1).astype(np.int64)


@pytest.fixture(scope="module")
def world():
    return World()


@pytest.fixture(scope="module")
def trained(world):
    """Weights after 150 steps of 32 histories, on the CPU."""
    backend = build_hardware_backend(HardwareConfig(hardware_platform="cpu", purpose="train"))
    model = SPEC.build(SPEC.read_config(SIZES), backend.ops)
    model.init_weights(torch.Generator().manual_seed(0))
    attention = backend.attention.build(model.attention_needs(torch.float32, train=True), backend.ops)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng, losses = np.random.default_rng(1), []
    for _ in range(150):
        tokens = torch.from_numpy(world.tokens(world.histories(rng, 32)))
        rows, length = tokens.shape
        plan = attention.packed(packed_layout(torch.full((rows,), length)))
        hidden = model(tokens.reshape(-1), torch.arange(length).repeat(rows), plan).view(rows, length, -1)
        logits = hidden[:, :-1] @ model.head_weight.T
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * losses[0], "it has learnt"
    return model.state_dict()


def engine_of(trained, world, platform, dtype):
    backend = build_hardware_backend(HardwareConfig(hardware_platform=platform))
    model = SPEC.build(SPEC.read_config(SIZES), backend.ops)
    model.load_state_dict(trained)
    model = model.to(backend.runtime.device, dtype).eval()
    graphs = GraphSizes(widths=(N,), requests=(1, 8), tokens=(64, 512))
    config = EngineConfig(limits=BatchLimits(max_requests=8), graphs=graphs)
    return Engine(model, LAYOUT, build_trie(world.catalog), backend, config)


def test_bf16_finds_the_cpu_s_items(trained, world):
    histories = world.histories(np.random.default_rng(2), 24)
    prompts = [np.append(tokens, LAYOUT.begin) for tokens in world.tokens(histories)]
    requests = [SearchRequest(prompt, n, n) for prompt, n in zip(prompts, (10, 50, N) * 8, strict=True)]
    found = engine_of(trained, world, "nvidia", torch.bfloat16).run(requests)
    expected = engine_of(trained, world, "cpu", torch.float32).run(requests)
    successors = 0
    for request, one, wanted, history in zip(requests, found, expected, histories, strict=True):
        ours, theirs = (dict(zip(each.leaves.tolist(), each.scores.tolist(), strict=True)) for each in (one, wanted))
        assert len(ours) == request.n
        # Those at the border of the list, or of the beams of an earlier level, may change places.
        border = min(theirs.values()) + 2 * TOLERANCE
        assert {leaf for leaf, score in theirs.items() if score > border} <= ours.keys()
        for leaf in ours.keys() & theirs.keys():
            assert ours[leaf] == pytest.approx(theirs[leaf], abs=TOLERANCE)
        best = max(theirs, key=theirs.__getitem__)
        successors += int(build_trie(world.catalog).rows[best] == world.successor[history[-1]])
    assert successors >= 12, "answers are what was learnt, of most histories"
