"""Attention through the fused kernel equals attention written out, eager and captured, with lengths from the host."""

from __future__ import annotations

import pytest
import torch

from polyrec.attention.layout import packed_layout
from polyrec.hardware.backends.ascend.attention import AscendAttention
from polyrec.hardware.backends.ascend.graph import AscendGraph
from polyrec.hardware.backends.ascend.ops import ascend_ops
from polyrec.hardware.base.attention import AttentionNeeds, PageTable
from polyrec.kvcache.pool import KVPool

from .standin import Library

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
LENGTHS = [5, 2, 7]
WIDTH = 3


def needs(**changes):
    options = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "dtype": torch.bfloat16, **changes}
    return AttentionNeeds(num_layers=LAYERS, **options)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def reference(query, keys, values):
    """One query [H, D] over keys and values [n, KV, D], in float64."""
    group = HEADS // KV_HEADS
    parts = []
    for head in range(HEADS):
        scores = keys[:, head // group].double() @ query[head].double() / DIM**0.5
        parts.append(torch.softmax(scores, 0) @ values[:, head // group].double())
    return torch.cat(parts)


class Batch:
    """Prompts and three passes of beams, with what attention gives for them."""

    def __init__(self, library, lengths=LENGTHS, table=None):
        self.attention = AscendAttention(needs(), ascend_ops(library), library)
        self.layout = packed_layout(torch.tensor(lengths), table=table)
        self.total = sum(lengths)
        num_slots = self.total if table is None else (int(table.pages.max()) + 1) * table.page_size
        self.pool = KVPool(LAYERS, num_slots, KV_HEADS, DIM, torch.bfloat16, torch.device("cpu"))
        self.prompt = [
            [draw(self.total, n, DIM, seed=s) for n, s in self._heads(10 * layer)] for layer in range(LAYERS)
        ]
        rows = len(lengths) * WIDTH
        self.beams = [
            [
                [draw(rows, n, DIM, seed=s) for n, s in self._heads(100 + 30 * step + 10 * layer)]
                for layer in range(LAYERS)
            ]
            for step in range(3)
        ]
        first = torch.arange(len(lengths)).repeat_interleave(WIDTH)[:, None] * WIDTH
        self.ancestors = [
            torch.empty((rows, 0), dtype=torch.int64),
            first + torch.tensor([2, 0, 0] * len(lengths))[:, None],
            first + torch.tensor([[2, 1], [0, 1], [2, 0]] * len(lengths)),
        ]

    @staticmethod
    def _heads(seed):
        return (HEADS, seed), (KV_HEADS, seed + 1), (KV_HEADS, seed + 2)

    def prefill(self):
        plan = self.attention.packed(self.layout, self.pool)
        return [plan.run(layer, *self.prompt[layer]) for layer in range(LAYERS)]

    def search(self):
        search = self.attention.search(self.layout, self.pool, width=WIDTH, num_kept=2)
        results = []
        for step in range(3):
            plan = search.step(self.ancestors[step], last=step == 2)
            results.append([plan.run(layer, *self.beams[step][layer]) for layer in range(LAYERS)])
        return results

    def expected_prefill(self, layer, lengths):
        query, key, value = self.prompt[layer]
        starts = [sum(LENGTHS[:request]) for request in range(len(LENGTHS))]
        return torch.stack(
            [
                reference(query[start + t], key[start : start + t + 1], value[start : start + t + 1])
                for start, length in zip(starts, lengths, strict=True)
                for t in range(length)
            ]
        )

    def expected_step(self, step, layer, lengths):
        rows = []
        query, key, value = self.beams[step][layer]
        for row in range(len(lengths) * WIDTH):
            request = row // WIDTH
            start = sum(LENGTHS[:request])
            keys, values = ([part[start : start + lengths[request]]] for part in self.prompt[layer][1:])
            for earlier, ancestor in enumerate(self.ancestors[step][row].tolist()):
                keys.append(self.beams[earlier][layer][1][ancestor, None])
                values.append(self.beams[earlier][layer][2][ancestor, None])
            rows.append(
                reference(query[row], torch.cat([*keys, key[row, None]]), torch.cat([*values, value[row, None]]))
            )
        return torch.stack(rows)


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def batch(library):
    return Batch(library)


def test_prompts_see_themselves_causally(batch):
    for layer, found in enumerate(batch.prefill()):
        close(found, batch.expected_prefill(layer, LENGTHS))
        keys, values = batch.pool.layer(layer)
        assert torch.equal(keys[: batch.total], batch.prompt[layer][1])
        assert torch.equal(values[: batch.total], batch.prompt[layer][2])


def test_prompts_of_one_token_need_no_mask(library):
    plan = AscendAttention(needs(), ascend_ops(library), library).packed(packed_layout(torch.tensor([1, 1])))
    value = draw(2, KV_HEADS, DIM, seed=3)
    found = plan.run(0, draw(2, HEADS, DIM), draw(2, KV_HEADS, DIM), value)
    close(found, value.repeat_interleave(HEADS // KV_HEADS, 1).flatten(1).double())


def test_views_of_a_fused_product_are_taken(library):
    fused = draw(LENGTHS[0], HEADS + 2 * KV_HEADS, DIM)
    query, key, value = fused.split((HEADS, KV_HEADS, KV_HEADS), 1)
    plan = AscendAttention(needs(), ascend_ops(library), library).packed(packed_layout(torch.tensor(LENGTHS[:1])))
    close(plan.run(0, query, key, value)[-1], reference(query[-1], key, value))


def test_beams_that_are_views_of_a_fused_product_are_taken(batch):
    batch.prefill()
    plain = batch.search()
    for layers in batch.beams:
        layers[:] = [list(torch.cat(parts, 1).split((HEADS, KV_HEADS, KV_HEADS), 1)) for parts in layers]
    for ours, theirs in zip(batch.search(), plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_padding_is_computed_neither_as_key_nor_as_query(library, batch):
    batch.prefill()
    prompts = [given for name, given in library.calls if name == "npu_fused_infer_attention_score"]
    assert [(given["actual_seq_lengths"], given["actual_seq_lengths_kv"]) for given in prompts] == [
        (LENGTHS, LENGTHS)
    ] * 2
    library.calls.clear()
    batch.search()
    beams = [given for name, given in library.calls if name == "npu_fused_infer_attention_score"]
    assert [(given["actual_seq_lengths"], given["actual_seq_lengths_kv"]) for given in beams] == [(None, LENGTHS)] * 6


def test_beams_see_their_prompt_and_their_own_tokens(batch):
    batch.prefill()
    for step, layers in enumerate(batch.search()):
        for layer, found in enumerate(layers):
            close(found, batch.expected_step(step, layer, LENGTHS))


@pytest.fixture
def in_pages(library):
    """The same prompts in pages of two tokens, in no order; the table has room for longer ones."""
    pages = torch.tensor([[9, 3, 5, 0, 0], [1, 0, 0, 0, 0], [8, 2, 7, 4, 0]], dtype=torch.int32)
    return Batch(library, table=PageTable(pages, 2, 10))


def test_pages_change_no_result(batch, in_pages):
    for ours, theirs in zip(in_pages.prefill(), batch.prefill(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(in_pages.search(), batch.search(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_keys_go_to_the_pages_and_nowhere_else(in_pages):
    in_pages.prefill()
    slots = [18, 19, 6, 7, 10, 2, 3, 16, 17, 4, 5, 14, 15, 8]
    for layer in range(LAYERS):
        for cache, rows in zip(in_pages.pool.layer(layer), in_pages.prompt[layer][1:], strict=True):
            assert torch.equal(cache[slots], rows)
            assert set(torch.nonzero(cache.flatten(1).any(1)).flatten().tolist()) == set(slots)


@pytest.mark.parametrize("lengths", [[3, 2, 6], [1, 1, 1]])
def test_an_updated_search_over_pages_has_the_new_lengths(library, in_pages, lengths):
    in_pages.prefill()
    captured = AscendGraph(library).capture(in_pages.search)
    captured.update({"lengths": torch.tensor(lengths)})
    for step, layers in enumerate(captured.replay()):
        for layer, found in enumerate(layers):
            close(found, in_pages.expected_step(step, layer, lengths))


def test_a_search_may_be_begun_again(batch):
    """As warm-ups and captures do: every run is a search of its own."""
    batch.prefill()
    first, second = batch.search(), batch.search()
    assert all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def test_a_captured_search_keeps_the_lengths_of_its_capture(library, batch):
    batch.prefill()
    captured = AscendGraph(library).capture(batch.search)
    for step, layers in enumerate(captured.replay()):
        for layer, found in enumerate(layers):
            close(found, batch.expected_step(step, layer, LENGTHS))


@pytest.mark.parametrize("lengths", [[3, 2, 6], [1, 1, 1]])
def test_an_updated_search_has_the_new_lengths(library, batch, lengths):
    batch.prefill()
    captured = AscendGraph(library).capture(batch.search)
    captured.replay()
    captured.update({"lengths": torch.tensor(lengths)})
    for step, layers in enumerate(captured.replay()):
        for layer, found in enumerate(layers):
            close(found, batch.expected_step(step, layer, lengths))
    assert library.names().count("graph_task_update_begin") == 3 * LAYERS


def test_captured_prompts_follow_new_lengths(library, batch):
    captured = AscendGraph(library).capture(batch.prefill)
    lengths = [4, 2, 5]
    captured.update({"lengths": torch.tensor(lengths)})
    starts = [sum(LENGTHS[:request]) for request in range(len(LENGTHS))]
    real = torch.cat([torch.arange(s, s + length) for s, length in zip(starts, lengths, strict=True)])
    for layer, found in enumerate(captured.replay()):
        close(found[real], batch.expected_prefill(layer, lengths))


def test_a_capture_does_not_read_lengths_from_the_device(library, batch, monkeypatch):
    """Lengths on a device cannot be read during a capture: the longest stands in until the update."""
    from polyrec.hardware.backends.ascend import attention

    class OnDevice:
        device = torch.device("meta")

        def __len__(self):
            return len(LENGTHS)

        def tolist(self):
            raise AssertionError("waits for the device")

    lengths = attention.PackedLengths(batch.layout.lengths, batch.layout.longest)
    monkeypatch.setattr(lengths, "_lengths", OnDevice())
    assert lengths.on_host(capturing=True) == [max(LENGTHS)] * len(LENGTHS)
    with pytest.raises(AssertionError, match="waits"):
        lengths.on_host(capturing=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"dtype": torch.float32}, ["torch.float32"]),
        ({"head_dim": 40}, ["head size 40"]),
        ({"sliding_window": 4, "soft_cap": 5.0, "mla": True}, ["sliding window", "soft cap", "MLA"]),
        ({"train": True}, ["gradients"]),
    ],
)
def test_what_it_lacks_is_said(changes, words):
    lacking = AscendAttention.support.lacks(needs(**changes), "ascend")
    assert len(lacking) == len(words)
    for text, word in zip(lacking, words, strict=True):
        assert word in text
    assert AscendAttention.support.lacks(needs(), "nvidia") == ["platform nvidia"]
