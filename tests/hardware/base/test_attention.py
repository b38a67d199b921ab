"""Where a layout says that prompts' keys and values lie, token by token, against a dictionary filled in a loop."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from polyrec.attention.layout import packed_layout
from polyrec.hardware.base.attention import AttentionBackend, AttentionSupport, PackedLayout, PageTable
from polyrec.hardware.ops import REFERENCE_OPS


class Random:
    """A random batch: lengths with empty places, cached beginnings, pages in no order, spare columns, spare rows."""

    def __init__(self, seed, *, cached):
        rng = np.random.default_rng(seed)
        self.size = int(rng.integers(1, 6))
        requests = int(rng.integers(1, 6))
        self.lengths = (rng.integers(1, 12, requests) * (rng.random(requests) < 0.8)).tolist()
        self.cached = rng.integers(0, 9, requests).tolist() if cached else [0] * requests
        self.whole = [length + num for length, num in zip(self.lengths, self.cached, strict=True)]
        counts = [-(-length // self.size) for length in self.whole]
        numbers = (rng.permutation(sum(counts) + 3) + 1).tolist()
        self.pages = [[numbers.pop() for _ in range(count)] for count in counts]
        columns = max(counts) + int(rng.integers(1, 3))
        self.table = PageTable(
            torch.tensor([[*row, *[0] * (columns - len(row))] for row in self.pages], dtype=torch.int32),
            self.size,
            int(rng.integers(max(*self.whole, 1), columns * self.size + 1)),
            torch.tensor(self.cached) if cached else None,
        )
        self.spare_rows = int(rng.integers(0, 9))
        self.layout = PackedLayout(
            torch.tensor(self.lengths),
            max(*self.lengths, 1) + int(rng.integers(0, 3)),
            sum(self.lengths) + self.spare_rows,
            table=self.table,
        )

    def slot(self, request, token):
        page, place = divmod(token, self.size)
        return self.pages[request][page] * self.size + place


@pytest.fixture(params=[(seed, cached) for seed in range(30) for cached in (False, True)], ids=str)
def batch(request):
    seed, cached = request.param
    return Random(seed, cached=cached)


def test_each_packed_row_has_the_slot_of_its_token(batch):
    expected = [
        batch.slot(request, token)
        for request, (begun, whole) in enumerate(zip(batch.cached, batch.whole, strict=True))
        for token in range(begun, whole)
    ]
    slots = batch.layout.slots
    assert slots.dtype == torch.int64
    assert slots.tolist()[: len(expected)] == expected
    assert len(set(expected)) == len(expected)


def test_rows_behind_the_last_sequence_go_to_page_0(batch):
    spare = batch.layout.slots[sum(batch.lengths) :]
    assert len(spare) == batch.spare_rows
    assert all(0 <= slot < batch.size for slot in spare.tolist())
    assert len(set(spare.tolist())) == min(batch.spare_rows, batch.size), "no slot twice before all were used"


def test_positions_count_cached_tokens_and_rows_without_a_sequence_have_none(batch):
    whole = [range(begun, end) for begun, end in zip(batch.cached, batch.whole, strict=True)]
    assert batch.layout.positions.dtype == torch.int64
    assert batch.layout.positions.tolist() == [place for places in whole for place in places] + [0] * batch.spare_rows


def test_a_sequences_last_row(batch):
    """A place without a sequence has the last row before it, or row 0."""
    assert batch.layout.last.dtype == torch.int64
    assert batch.layout.last.tolist() == [max(int(end) - 1, 0) for end in np.cumsum(batch.lengths)]


def test_what_an_operation_has_found_is_not_derived_again(batch):
    calls = []

    def locate(*arguments):
        calls.append(arguments)
        return REFERENCE_OPS.kv.locate(*arguments)

    layout = batch.layout.located_by(locate)
    parts = layout.positions, layout.slots, layout.last
    assert all(one is other for one, other in zip(parts, vars(layout.located).values(), strict=True))
    for one, other in zip(parts, (batch.layout.positions, batch.layout.slots, batch.layout.last), strict=True):
        assert torch.equal(one, other)
    assert len(calls) == 1
    assert layout.of_last.located is None, "another layout"
    assert dataclasses.replace(layout, located=None) == batch.layout


def test_each_prompts_tokens_are_found_with_what_is_cached(batch):
    slots, num_slots = batch.layout.prompt_slots, (int(batch.table.pages.max()) + 1) * batch.size
    assert slots.dtype == torch.int64
    assert slots.shape == (len(batch.lengths), batch.table.longest)
    for request, whole in enumerate(batch.whole):
        assert slots[request, :whole].tolist() == [batch.slot(request, token) for token in range(whole)]
    assert 0 <= int(slots.min()) <= int(slots.max()) < num_slots, "some slot of the cache behind a prompt's end"


def test_prompts_are_as_long_as_their_cached_tokens_and_the_packed_ones(batch):
    assert batch.layout.prompt_lengths.tolist() == batch.whole
    assert batch.layout.longest_prompt == batch.table.longest >= max(batch.whole)
    assert (batch.layout.cached is None) == (batch.table.cached is None)


def test_without_a_table_the_packed_rows_are_the_slots(batch):
    layout = dataclasses.replace(batch.layout, table=None)
    assert layout.slots.tolist() == list(range(layout.num_tokens))
    assert layout.cached is None
    assert layout.prompt_lengths.tolist() == batch.lengths
    assert layout.longest_prompt == layout.longest
    start = 0
    for row, length in zip(layout.prompt_slots, batch.lengths, strict=True):
        assert row[:length].tolist() == list(range(start, start + length))
        start += length


def test_a_copied_layout_keeps_the_hosts_side(batch):
    moved = []

    def to_device(tensor):
        moved.append(tensor)
        return tensor.clone()

    layout = packed_layout(torch.tensor([max(length, 1) for length in batch.lengths]), None, to_device, batch.table)
    assert layout.table.host_pages is batch.table.pages
    assert layout.table.host_cached is batch.table.cached
    assert any(tensor is batch.table.pages for tensor in moved)
    assert torch.equal(layout.table.pages, batch.table.pages)
    assert (layout.table.cached is None) == (batch.table.cached is None)
    assert layout.table.cached is None or layout.table.cached is not batch.table.cached


def test_nothing_is_claimed_unasked():
    assert not AttentionSupport().prefix
    assert not AttentionBackend.capturable
