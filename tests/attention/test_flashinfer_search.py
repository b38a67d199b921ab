"""Captured searches whose beams read prompts through FlashInfer: who takes it, what it is told and what comes of it, on a
stand-in; on a device, its numbers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from flashinfer_stand_in import on_device, on_linux

from polyrec.hardware.base.attention import AttentionNeeds, PackedLayout, PageTable
from polyrec.kvcache.pool import KVPool
from polyrec.testing.brute_force import beam_attention

BF16 = torch.bfloat16
SIZE, COLUMNS, DIM = 16, 3, 64  # of pages, of the table, of a head


def needs(**more):
    return AttentionNeeds(2, 4, 2, DIM, dtype=BF16, **more)


def tables(places, columns=COLUMNS, asked=None, device="cpu"):
    """A table that a batch is yet to fill, and a cache."""
    asked = asked or needs()
    pages = torch.zeros((places, columns), dtype=torch.int32, device=device)
    pool = KVPool(2, (places * columns + 1) * SIZE, asked.num_kv_heads, asked.head_dim, BF16, torch.device(device))
    return PageTable(pages, SIZE, columns * SIZE), pool


def fill(table, pool, lengths):
    """Gives a batch's prompts pages of no order, and all tokens keys and values; page 0, and pages of nobody, too."""
    numbers = torch.randperm(table.pages.numel())[: len(lengths) * table.pages.shape[1]] + 1
    pages = numbers.reshape(len(lengths), -1).int()
    owned = torch.arange(pages.shape[1]) * SIZE < torch.tensor(lengths)[:, None]
    table.pages.zero_()
    table.pages[: len(lengths)] = (pages * owned).to(table.pages.device)
    for part in (pool.keys, pool.values):
        part.normal_()


def prompt_of(table, pool, layer, row, length):
    """Its keys and values, float64."""
    token = torch.arange(length)
    slots = table.pages[row].cpu().long()[token // SIZE] * SIZE + token % SIZE
    return tuple(part[slots.to(part.device)].double().cpu() for part in pool.layer(layer))


def join_by_hand(asked, query, top, result, own, into):
    """What `join_own` is to do, in float64."""
    assert into is None, "quantised rows were not asked for"
    rows, group = len(query), asked.num_heads // asked.num_kv_heads
    steps = range(own.ancestors.shape[1])
    keys = [own.suffix_keys[step][own.ancestors[:, step]] for step in steps] + [own.key]
    values = [own.suffix_values[step][own.ancestors[:, step]] for step in steps] + [own.value]
    keys, values = (torch.stack(part, 1).double().repeat_interleave(group, 2) for part in (keys, values))
    scores = torch.einsum("rhd,rnhd->rhn", query.double(), keys) / asked.head_dim**0.5
    if asked.soft_cap:
        scores = asked.soft_cap * torch.tanh(scores / asked.soft_cap)
    weights = torch.cat((top.double()[:, :, None] * math.log(2), scores), 2).softmax(-1)
    values = torch.cat((result.view(query.shape)[:, None].double(), values), 1)
    result.copy_(torch.einsum("rhn,rnhd->rhd", weights, values).reshape(rows, -1))


@pytest.fixture
def search_module(module, monkeypatch):
    """`polyrec.attention.flashinfer` on the stand-in; our kernel is for a device."""
    monkeypatch.setattr(module, "join_own", join_by_hand)
    return module


class Beams:
    """Passes over all beams of a search, whose numbers stay in place: what a graph replays."""

    def __init__(self, attention, table, pool, width, host_plan, device="cpu"):
        places = len(table.pages)
        self.needs, self.width, self.rows = attention.needs, width, places * width
        lengths = torch.ones(places, dtype=torch.int64, device=device)
        self.layout = PackedLayout(lengths, table.longest, table.longest, table=table, host_plan=host_plan)
        self.search = lambda: attention.search(self.layout, pool, width=width, num_kept=2)
        heads = self.needs.num_heads + 2 * self.needs.num_kv_heads
        self.fused = torch.empty((3, self.rows, heads, self.needs.head_dim), dtype=BF16, device=device)
        self.ancestors = torch.empty((self.rows, 2), dtype=torch.int64, device=device)
        self.draw()

    def draw(self):
        self.fused.normal_()
        request = torch.arange(self.rows)[:, None] // self.width
        drawn = request * self.width + torch.randint(self.width, (self.rows, 2))
        self.ancestors.copy_(drawn.to(self.ancestors.device))

    def parts(self, number):
        kv = self.needs.num_kv_heads
        return self.fused[number].split((self.needs.num_heads, kv, kv), 1)

    def run(self):
        """Outputs of both layers in the last of three passes: [2, rows, heads · D]."""
        search, outs = self.search(), []
        for number in range(3):
            plan = search.step(self.ancestors[:, :number], last=number == 2)
            outs = [plan.run(layer, *self.parts(number)) for layer in range(2)]
        return torch.stack(outs)

    def expected(self, table, pool, layer, lengths, row):
        own = [
            tuple(part[at].double().cpu() for part in self.parts(number)[1:])
            for number, at in enumerate([*self.ancestors[row].tolist(), row])
        ]
        prompt = prompt_of(table, pool, layer, row // self.width, lengths[row // self.width])
        return beam_attention(self.parts(2)[0][row].double().cpu(), prompt, own, self.needs)


@on_linux
@pytest.mark.parametrize("options", [{}, {"soft_cap": 1.5}], ids=str)
def test_beams_read_the_prompts_of_each_batch_through_one_plan(search_module, hardware, log, options):
    attention = search_module.FlashInferAttention(needs(**options), hardware.ops)
    (table, pool), width = tables(8), 128
    host_plan = attention.search_host_plan(table, pool, width=width)
    beams = Beams(attention, table, pool, width, host_plan)
    log.clear()
    for lengths in ([1] * 8, [33, 48, 1], [16, 17, 2, 47, 30, 15, 1, 5]):
        fill(table, pool, lengths)
        beams.draw()
        host_plan.renew(torch.tensor(lengths))
        found = beams.run()
        assert torch.isfinite(found).all(), "rows of no prompt are written too"
        for layer, request in enumerate((0, len(lengths) - 1)):
            for row in (request * width, request * width + 77):
                expected = beams.expected(table, pool, layer, lengths, row)
                torch.testing.assert_close(found[layer, row].double(), expected, rtol=2e-2, atol=2e-2)
    assert [entry for entry in log if isinstance(entry, str)] == ["wait", "plan pages", "record"] * 3


@on_linux
def test_queries_and_pages_are_read_where_they_lie(search_module, hardware, log):
    attention = search_module.FlashInferAttention(needs(), hardware.ops)
    table, pool = tables(8)
    host_plan = attention.search_host_plan(table, pool, width=128)
    host_plan.renew(torch.tensor([3]))
    beams = Beams(attention, table, pool, 128, host_plan)
    beams.run()
    query, *pages = log[-1]
    assert query == (beams.parts(2)[0].data_ptr(), beams.parts(2)[0].stride())
    assert pages == [(part.data_ptr(), (SIZE * 128, 128, 64, 1)) for part in pool.layer(1)]


@on_linux
def test_fewer_beams_and_launched_searches_are_left_to_triton(search_module, hardware, monkeypatch):
    """A pass over fewer beams than were recorded, as the first levels of a small catalog have, too."""
    from polyrec.attention import triton

    class Reader:
        def __init__(self, *_, width):
            widths.append(width)

        quantizes = False

        def attend(self, layer, query, result, own, into):
            result.zero_()

    monkeypatch.setattr(triton, "PromptReader", Reader)
    widths: list = []
    attention = search_module.FlashInferAttention(needs(), hardware.ops)
    table, pool = tables(8)
    host_plan = attention.search_host_plan(table, pool, width=128)
    host_plan.renew(torch.tensor([3]))
    beams = Beams(attention, table, pool, 128, host_plan)
    beams.run()
    assert widths == []
    beams.search().step(beams.ancestors[: 8 * 5, :0], last=False)
    assert widths == [5]
    beams.layout = dataclasses.replace(beams.layout, host_plan=None)
    beams.run()
    assert widths == [5, 128]


@on_linux
def test_who_takes_it(search_module, hardware, monkeypatch):
    build = lambda **more: search_module.FlashInferAttention(needs(**more), hardware.ops)  # noqa: E731
    (table, pool), attention = tables(8), build()
    assert attention.search_host_plan(table, pool, width=128) is not None
    assert attention.search_host_plan(table, pool, width=127) is None
    fewer = dataclasses.replace(table, pages=table.pages[:7])
    assert attention.search_host_plan(fewer, pool, width=128) is None
    assert attention.search_host_plan(fewer, pool, width=150) is not None
    assert build(sliding_window=40).search_host_plan(table, pool, width=128) is None
    fp8 = KVPool(2, 32, 2, DIM, torch.float8_e4m3fn, torch.device("cpu"))
    assert attention.search_host_plan(table, fp8, width=128) is None
    monkeypatch.setattr(search_module.flashinfer.utils, "is_sm90a_supported", lambda device: False)
    assert build().search_host_plan(table, pool, width=128) is None, "its kernels read more than a plan wrote"


@on_linux
@pytest.mark.parametrize(("heads", "places", "width"), [(4, 1, 1024), (128, 32, 512), (128, 1, 65_536)])
def test_a_plan_has_room_for_every_piece(module, hardware, heads, places, width):
    asked = AttentionNeeds(2, heads, 2, DIM, dtype=BF16)
    slot = module.SearchSlot(torch.empty(8, dtype=torch.uint8), asked, tables(places)[0], width)
    slot.renew(torch.tensor([5]))  # the stand-in looks


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize(
    ("heads", "head_dim", "options"), [((16, 8), 128, {}), ((16, 2), 64, {"soft_cap": 1.5})], ids=str
)
@pytest.mark.parametrize(("places", "width"), [(8, 256), (2, 1000)])
def test_replays_read_the_prompts_of_their_batch(nvidia, heads, head_dim, options, places, width):
    """Against float64; and to the bit whatever the neighbours are, which a batch of fewer requests has too."""
    device, asked = nvidia.runtime.device, AttentionNeeds(2, *heads, head_dim, dtype=BF16, **options)
    attention = nvidia.attention.build(asked, nvidia.ops)
    table, pool = tables(places, 160, asked, device)
    host_plan = attention.search_host_plan(table, pool, width=width)
    host_plan.renew(torch.ones(places, dtype=torch.int64))
    with torch.inference_mode():
        beams = Beams(attention, table, pool, width, host_plan, device)
        graph = nvidia.graph.capture(beams.run)
        for lengths in ([2455, 1, 96, 97, 2560, 1000, 193, 16][:places], [191], [2560] * places):
            fill(table, pool, lengths)
            beams.draw()
            host_plan.renew(torch.tensor(lengths))
            found = graph.replay().clone()
            assert torch.isfinite(found).all()
            for request in range(len(lengths)):
                for layer, row in enumerate((request * width, request * width + width - 1)):
                    expected = beams.expected(table, pool, layer, lengths, row)
                    difference = found[layer, row].double().cpu() - expected
                    assert float(difference.norm() / expected.norm()) < 8e-3
                    assert float(difference.abs().max()) < 0.05
            table.pages[1:].zero_()
            host_plan.renew(torch.tensor(lengths[:1]))
            assert torch.equal(graph.replay()[:, :width], found[:, :width])
    graph.close()
