"""Prompts in pages, with and without a cached beginning, through our Triton attention: against float64, one query at a time.

Prefills, beams, and the list of what the kernels' programs do.

`test_triton.py` runs this file in a process of its own, in Triton's interpreter or on a device.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import mmap
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conversions import INTERPRETED, backend_of_bodies, converted

from polyrec.attention.triton import PackedPlan, TritonAttention, TritonSearch
from polyrec.attention.triton_prompt import join_own
from polyrec.attention.triton_work import ITEMS_OF_SEARCH, MOST_ITEMS, list_work
from polyrec.hardware.base.attention import AttentionNeeds, HeadRotation, PackedLayout, PageTable
from polyrec.hardware.ops.linear import QuantizedRows, quantize_fp8
from polyrec.hardware.ops.spec import FP8, TOLERANCES
from polyrec.testing.brute_force import attend, beam_attention, within

DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
DIM, SIZE, LAYERS, SPARE = 16, 16, 2, 5  # SPARE: rows behind the last sequence
EPS = 1e-6
HEADS = [(2, 2), (4, 2), (4, 1)]
# (cached, new) tokens of each request. A request is cut where its rows are few; (0, 0) is a place without a sequence.
FEW = [(300, 9), (0, 0), (0, 12), (513, 1), (16, 20)]
MIXED = [(0, 40), (320, 3), (0, 0), (48, 70), (0, 1), (1, 1)]
LONG = [(160, 200), (700, 20)]


class Case(NamedTuple):
    """Whole prompts: query, key, value [T, heads, D] of each layer and request; pages, the layout and the cache of all."""

    rows: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]
    layout: PackedLayout
    cache: Cache
    needs: AttentionNeeds


class Cache:
    """Keys and values that are NaN until they are written."""

    def __init__(self, num_slots, kv_heads, dtype, device):
        shape = (LAYERS, num_slots, kv_heads, DIM)
        self.keys, self.values = (torch.full(shape, float("nan")).to(dtype).to(device) for _ in range(2))

    def layer(self, layer):
        return self.keys[layer], self.values[layer]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if INTERPRETED:
        import triton.runtime.interpreter

        monkeypatch.setattr(triton.runtime.interpreter, "_convert_float", converted)


@pytest.fixture(scope="module")
def backend():
    return backend_of_bodies()


def draw(
    backend,
    shapes,
    heads=(4, 2),
    *,
    dtype=torch.float32,
    cache_dtype=None,
    window=None,
    soft_cap=None,
    quantized=False,
    seed=0,
):
    """A case whose beginnings are in the cache, its pages shuffled."""
    rng = np.random.default_rng(seed)
    move = backend.runtime.to_device
    needs = AttentionNeeds(LAYERS, *heads, DIM, dtype, window, soft_cap, quantized=quantized)
    cached, new = (torch.tensor(part) for part in zip(*shapes, strict=True))
    pages = shuffled_pages(rng, cached + new)
    cache = Cache((int(pages.max()) + 1) * SIZE, heads[1], cache_dtype or dtype, backend.runtime.device)
    rows = [
        [
            tuple(
                torch.from_numpy(rng.standard_normal((sum(shape), count, DIM)) * 1.3).to(dtype)
                for count in (heads[0], heads[1], heads[1])
            )
            for shape in shapes
        ]
        for _ in range(LAYERS)
    ]
    keep(backend, cache, rows, pages, cached.tolist())
    table = PageTable(move(pages), SIZE, int((cached + new).max()), move(cached))
    layout = PackedLayout(move(new), int(new.max()), int(new.sum()) + SPARE, table=table)
    return Case(rows, layout, cache, needs)


def shuffled_pages(rng, lengths):
    """int32 [R, P]: pages of prompts from 1 on, in any order; 0 behind a prompt's end."""
    numbers = -(-lengths.numpy() // SIZE)
    pages = np.zeros((len(numbers), numbers.max()), np.int32)
    free = rng.permutation(np.arange(1, numbers.sum() + 1))
    for row, taken in zip(pages, np.split(free, np.cumsum(numbers)[:-1]), strict=True):
        row[: len(taken)] = taken
    return torch.from_numpy(pages)


def keep(backend, cache, rows, pages, lengths):
    """Writes the first `lengths` tokens of each prompt."""
    move = backend.runtime.to_device
    for layer, requests in enumerate(rows):
        for (_, key, value), num, where in zip(requests, lengths, pages, strict=True):
            token = torch.arange(num)
            slots = move(where[token // SIZE].long() * SIZE + token % SIZE)
            backend.ops.kv.write(move(key[:num]), move(value[:num]), *cache.layer(layer), slots)


def packed_rows(case, layer, move):
    """Views of one matrix: what is not cached of each request, and rows that belong to none."""
    parts = [
        torch.cat([of_request[i][num:] for of_request, num in zip(case.rows[layer], cached_of(case), strict=True)])
        for i in range(3)
    ]
    fused = torch.cat([part.flatten(1) for part in parts], 1)
    fused = move(torch.cat([fused, torch.ones(SPARE, fused.shape[1], dtype=fused.dtype)]))
    return [part.unflatten(1, (-1, DIM)) for part in fused.split([part[0].numel() for part in parts], 1)]


def cached_of(case):
    return (case.layout.prompt_lengths - case.layout.lengths).tolist()


def prefill(backend, case):
    """Outputs of each layer and request, on the host. Odd layers write keys and values before."""
    plan = TritonAttention(case.needs, backend.ops).packed(case.layout, case.cache)
    found = []
    for layer in range(LAYERS):
        rows = packed_rows(case, layer, backend.runtime.to_device)
        if layer % 2:
            backend.ops.kv.write(*rows[1:], *plan.target(layer))
            out = plan.run_written(layer, *rows)
        else:
            out = plan.run(layer, *rows)
        if case.needs.quantized:
            found.append(QuantizedRows(*(backend.runtime.to_host(part)[:-SPARE] for part in out)))
            continue
        assert out.dtype == case.needs.dtype
        found.append(backend.runtime.to_host(out)[:-SPARE].split(case.layout.lengths.tolist()))
    return found


def check_quantized(found, plain):
    """Each row as the reference quantises it: its scale, and values but for a few that rounding turned into the next."""
    values, scale = quantize_fp8(plain)
    torch.testing.assert_close(found.scale, scale, rtol=1e-5, atol=0)
    differing = (found.values.float() != values.float()).float().mean()
    assert differing < 0.01
    torch.testing.assert_close(
        found.values.float() * found.scale, plain.float(), rtol=1 / 8, atol=float(scale.max()) / 256
    )


def through(tensor, dtype):
    """What a cache of another dtype keeps of keys or values."""
    return (tensor if dtype == tensor.dtype else tensor.float().clamp(-448, 448).to(dtype).float()).double()


def check_prefill(backend, case):
    tolerance = TOLERANCES[case.needs.dtype]
    for layer, outs in enumerate(prefill(backend, case)):
        for (query, key, value), num, out in zip(case.rows[layer], cached_of(case), outs, strict=True):
            kept = case.cache.keys.dtype if num else key.dtype  # without a beginning nothing is read from the cache
            key, value = (through(part, kept) for part in (key, value))
            for i, row in enumerate(out.double()):
                seen = within(case.needs.sliding_window, list(range(num + i + 1)))
                expected = attend(query[num + i].double(), key[seen], value[seen], case.needs.soft_cap)
                torch.testing.assert_close(row, expected, rtol=tolerance.relative, atol=tolerance.absolute)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shapes", "heads"), [*[(FEW, heads) for heads in HEADS], (MIXED, (2, 2)), (LONG, (4, 2))])
def test_the_rest_of_prompts(backend, shapes, heads, dtype):
    check_prefill(backend, draw(backend, shapes, heads, dtype=dtype))


@pytest.mark.parametrize("window", [1, 7, 100, 400])
def test_windows_reach_into_the_cached_beginning(backend, window):
    for shapes in (FEW, MIXED):
        check_prefill(backend, draw(backend, shapes, window=window))


@pytest.mark.parametrize(("shapes", "num_whole"), [(LONG, 0), (FEW, LAYERS)])
def test_where_every_prompt_is_begun_nothing_is_launched_for_whole_ones(backend, monkeypatch, shapes, num_whole):
    calls, attend_packed = [], PackedPlan._attend_packed
    monkeypatch.setattr(PackedPlan, "_attend_packed", lambda *given: calls.append(1) or attend_packed(*given))
    case = draw(backend, shapes)
    table = dataclasses.replace(case.layout.table, all_begun=num_whole == 0)
    check_prefill(backend, case._replace(layout=dataclasses.replace(case.layout, table=table)))
    assert len(calls) == num_whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shapes", "window"), [(FEW, None), (MIXED, None), (MIXED, 7), (LONG, None)])
def test_the_last_row_of_each_prompt(backend, shapes, window, dtype):
    """Apart from the others, whose keys and values are there: also of a prompt of one token, and of a place without any."""
    case = draw(backend, shapes, dtype=dtype, window=window)
    prefill(backend, case)
    move, tolerance, last = backend.runtime.to_device, TOLERANCES[dtype], case.layout.last
    plan = TritonAttention(case.needs, backend.ops).packed(case.layout.of_last, case.cache)
    for layer, requests in enumerate(case.rows):
        rows = [part.index_select(0, last) for part in packed_rows(case, layer, move)]
        found = backend.runtime.to_host(plan.run_written(layer, *rows)).double()
        for row, (query, key, value), (cached, new) in zip(found, requests, shapes, strict=True):
            if new:
                seen = within(window, list(range(cached + new)))
                expected = attend(query[-1].double(), key[seen].double(), value[seen].double(), None)
                torch.testing.assert_close(row, expected, rtol=tolerance.relative, atol=tolerance.absolute)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", [FEW, MIXED, LONG])
def test_the_rest_of_prompts_quantised(backend, shapes, dtype):
    """Also of prompts that are not cut, and of those of which nothing is cached."""
    plain, found = (prefill(backend, draw(backend, shapes, dtype=dtype, quantized=given)) for given in (False, True))
    for of_layer, rows in zip(found, plain, strict=True):
        check_quantized(of_layer, torch.cat(rows))


def test_soft_cap(backend):
    check_prefill(backend, draw(backend, FEW, soft_cap=1.5))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_a_cache_of_fewer_bits(backend, cache_dtype):
    for shapes in (FEW, MIXED):
        check_prefill(backend, draw(backend, shapes, cache_dtype=cache_dtype))


@pytest.mark.parametrize("shapes", [FEW, MIXED])
def test_room_for_more_changes_nothing(backend, shapes):
    """As in a recorded prefill: places, pages, rows and lengths that are not there."""
    case = draw(backend, shapes)
    expected = prefill(backend, case)
    lengths, table = case.layout.lengths, case.layout.table
    more = lambda tensor: torch.cat([tensor, tensor.new_zeros(3, *tensor.shape[1:])])  # noqa: E731
    pages = torch.cat([table.pages, table.pages.new_zeros(len(lengths), 7)], 1)
    table = PageTable(more(pages), SIZE, table.longest + 900, more(table.cached))
    layout = PackedLayout(more(lengths), case.layout.longest + 2, case.layout.num_tokens, table=table)
    rows = [[*requests, *[tuple(part[:0] for part in requests[0])] * 3] for requests in case.rows]
    again = prefill(backend, case._replace(layout=layout, rows=rows))
    for layer in range(LAYERS):
        for found, out in zip(again[layer], expected[layer], strict=False):
            torch.testing.assert_close(found, out, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shapes", "cache_dtype"), [(FEW, None), (MIXED, FP8), (LONG, None)])
def test_neighbours_change_nothing(backend, shapes, cache_dtype, dtype):
    """Bit for bit; a prompt of which nothing is cached gets what it gets in a batch that reads no cache."""
    case = draw(backend, shapes, dtype=dtype, cache_dtype=cache_dtype)
    together = prefill(backend, case)
    for request, (num, length) in enumerate(shapes):
        if length:
            table = dataclasses.replace(
                case.layout.table,
                pages=case.layout.table.pages[request : request + 1],
                longest=num + length,
                cached=case.layout.table.cached[request : request + 1] if num else None,
            )
            layout = PackedLayout(case.layout.lengths[request : request + 1], length, length + SPARE, table=table)
            rows = [[requests[request]] for requests in case.rows]
            alone = prefill(backend, case._replace(rows=rows, layout=layout))
            for layer in range(LAYERS):
                torch.testing.assert_close(alone[layer][0], together[layer][request], rtol=0, atol=0)


class Beams(NamedTuple):
    """What a search leaves: outputs of each pass [R · W, heads · D], on the host, and what they should be."""

    found: list[torch.Tensor]
    expected: list[torch.Tensor]


class OtherReader:
    """Reads prompts in float64, and keeps what FlashInfer would: the result, rounded, and logarithms of sums in base 2."""

    def __init__(self, backend, case, width):
        self.backend, self.case, self.width, self.num_calls = backend, case, width, 0
        self.quantizes, self.rotates = case.needs.quantized, False

    def attend(self, layer, query, result, own, into):
        host, move = self.backend.runtime.to_host, self.backend.runtime.to_device
        needs, group, found, tops = self.case.needs, query.shape[1] // own.key.shape[1], [], []
        for row, q in enumerate(host(query).double()):
            key, value = (part.double() for part in self.case.rows[layer][row // self.width][1:])
            found.append(attend(q, key, value, needs.soft_cap))
            scores = torch.einsum("hd,nhd->hn", q, key.repeat_interleave(group, 1)) / DIM**0.5
            if needs.soft_cap:
                scores = needs.soft_cap * torch.tanh(scores / needs.soft_cap)
            tops.append(scores.logsumexp(-1) / math.log(2))
        result.copy_(move(torch.stack(found).to(result.dtype)))
        join_own(needs, query, move(torch.stack(tops).float()), result, own, into)
        self.num_calls += 1


def turned_rows(backend, rows, places, rng):
    """Query, key and value rows as they leave a product, at `places`, and what attends: normalised and rotated in float64,
    rounded. -> the rotation, and query, key, value."""
    weights = torch.from_numpy(rng.standard_normal((2, DIM)) + 1).to(rows[0].dtype)
    turns = torch.tensor(places).double()[:, None] / 10 ** torch.linspace(0, 3, DIM // 2).double()
    cos, sin = turns.cos().float(), turns.sin().float()
    turned = []
    for part, weight in zip(rows, weights, strict=False):
        normed = torch.nn.functional.rms_norm(part.double(), (DIM,), weight.double(), EPS)
        first, second = normed.chunk(2, -1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        turned.append(torch.cat([first * c - second * s, second * c + first * s], -1).to(part.dtype))
    move = backend.runtime.to_device
    return HeadRotation(*map(move, (*weights, cos, sin)), EPS), (*turned, rows[2])


def search(
    backend,
    lengths,
    widths,
    *,
    paged=True,
    heads=(4, 2),
    dtype=torch.float32,
    cache_dtype=None,
    others=None,
    turns=False,
    **more,
):
    """Passes of `widths` beams of requests whose prompts have `lengths` tokens; 0: a place without a request.

    others: another reader is put into it, and reads the prompts of passes over the most beams. turns: plans rotate.
    """
    case = draw(backend, [(0, length) for length in lengths], heads, dtype=dtype, cache_dtype=cache_dtype, **more)
    move, needs, rng = backend.runtime.to_device, case.needs, np.random.default_rng(1)
    layout = dataclasses.replace(case.layout, table=dataclasses.replace(case.layout.table, cached=None))
    if paged:
        pages = backend.runtime.to_host(layout.table.pages)
        keep(backend, case.cache, case.rows, pages, lengths)
    else:
        layout = dataclasses.replace(layout, table=None)
        for layer, requests in enumerate(case.rows):
            rows = [move(torch.cat([of_request[i] for of_request in requests])) for i in (1, 2)]
            backend.ops.kv.write(*rows, *case.cache.layer(layer), move(torch.arange(sum(lengths))))
    attention = TritonAttention(needs, backend.ops)
    if others is None:
        walk = attention.search(layout, case.cache, width=max(widths), num_kept=len(widths) - 1)
    else:
        others.append(OtherReader(backend, case, max(widths)))
        walk = TritonSearch(needs, backend.ops, layout, case.cache, max(widths), len(widths) - 1, others[0])
    paths, taken, result = [[] for _ in range(len(lengths) * widths[0])], [], Beams([], [])
    layer = LAYERS - 1
    for number, width in enumerate(widths):
        count = len(lengths) * width
        fused = torch.from_numpy(rng.standard_normal((count, sum(heads) + heads[1], DIM)) * 1.3).to(dtype)
        own = fused.split((heads[0], heads[1], heads[1]), 1)
        last = number == len(widths) - 1
        plan = walk.step(move(torch.tensor(paths, dtype=torch.int64).reshape(count, number)), last=last)
        given = move(fused).split((heads[0], heads[1], heads[1]), 1)
        if turns:
            assert plan.rotates
            rotation, own = turned_rows(
                backend, own, [length + number for length in lengths for _ in range(width)], rng
            )
            found = plan.run_product(layer, *given, rotation)
        else:
            found = plan.run(layer, *given)
        if isinstance(found, QuantizedRows):
            result.found.append(QuantizedRows(*map(backend.runtime.to_host, found)))
        else:
            result.found.append(backend.runtime.to_host(found))
        expected = []
        for row, path in enumerate(paths):
            tokens = [(taken[t][1][at], taken[t][2][at]) for t, at in enumerate(path)] + [(own[1][row], own[2][row])]
            prompt = (through(part, case.cache.keys.dtype) for part in case.rows[layer][row // width][1:])
            tokens = [(key.double(), value.double()) for key, value in tokens]
            expected.append(beam_attention(own[0][row].double(), tuple(prompt), tokens, needs))
        result.expected.append(torch.stack(expected))
        taken.append(own)
        if not last:
            parents = (
                rng.integers(0, width, (len(lengths), widths[number + 1])) + np.arange(len(lengths))[:, None] * width
            )
            paths = [[*paths[parent], parent] for parent in parents.flatten().tolist()]
    return result


def check_search(result, dtype=torch.float32):
    tolerance = TOLERANCES[dtype]
    for found, expected in zip(*result, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance.relative, atol=tolerance.absolute)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "widths"), [((2, 2), (2, 6, 6)), ((4, 2), (20,)), ((4, 1), (20,)), ((4, 1), (40,))])
def test_beams_read_pages(backend, heads, widths, dtype):
    """Tiles of 16, 64 and 128 rows, and two tiles; alone, where prompts are cut, and among many, where they are not."""
    check_search(search(backend, (513, 0, 30), widths, heads=heads, dtype=dtype), dtype)
    check_search(search(backend, (513, *[0] * 40, 30), widths, heads=heads, dtype=dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(("heads", "widths"), [((2, 2), (2, 6, 6)), ((4, 2), (20,)), ((6, 3), (3, 3))])
def test_quantised_beams(backend, heads, widths, others, dtype):
    """Through our reader, of prompts that are cut and of one that is not, and joined to what another one found."""
    given = {"heads": heads, "dtype": dtype}
    plain, found = (
        search(backend, (513, 7, 30), widths, quantized=quantized, others=[] if others else None, **given)
        for quantized in (False, True)
    )
    for width, rows, expected in zip(widths, found.found, plain.found, strict=True):
        if isinstance(rows, QuantizedRows):
            check_quantized(rows, expected)
        else:
            assert others
            assert width < max(widths), "of fewer beams, which our reader reads without cutting"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "widths", "more"),
    [
        ((2, 2), (2, 6, 6), {}),
        ((4, 2), (20, 20), {}),
        ((4, 1), (40, 40, 3), {"window": 100}),
        ((6, 3), (3, 3), {"soft_cap": 1.5}),
    ],
)
def test_plans_rotate_what_leaves_the_product(backend, heads, widths, more, dtype):
    """Queries in the kernel that reads prompts, in tiles of 16 to 128 rows; keys where parts are merged, which keeps them."""
    check_search(search(backend, (513, 0, 30), widths, heads=heads, dtype=dtype, turns=True, **more), dtype)


def test_plans_rotate_where_they_quantise(backend):
    plain, found = (search(backend, (513, 30), (5, 5), turns=True, quantized=quantized) for quantized in (False, True))
    for rows, expected in zip(found.found, plain.found, strict=True):
        check_quantized(rows, expected)


@pytest.fixture
def stores(monkeypatch):
    """The addresses that Triton's interpreter has stored to, one entry each time; on a device nobody can tell."""
    found = []
    if INTERPRETED:
        from triton.runtime import interpreter

        def create_masked_store(builder, pointers, values, mask, *more):
            found.extend(pointers.data[mask.data.astype(bool)].ravel().tolist())
            return store(builder, pointers, values, mask, *more)

        store = interpreter.InterpreterBuilder.create_masked_store
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", create_masked_store)
    return found


@pytest.mark.parametrize("quantized", [False, True])
def test_plans_that_rotate_write_each_new_key_once_and_in_the_last_pass_none(backend, stores, quantized):
    """Two heads share a key, and programs have a head or two, or all of them where they quantise. Behind the first layer's
    suffix lies the next one's, which would show a pass too many."""
    lengths, widths, heads, layer = (130, 20), (3, 4, 4), (4, 2), 0
    rng, move, host = np.random.default_rng(5), backend.runtime.to_device, backend.runtime.to_host
    case = draw(backend, [(0, length) for length in lengths], heads, quantized=quantized)
    pages = host(case.layout.table.pages)
    keep(backend, case.cache, case.rows, pages, lengths)
    layout = dataclasses.replace(case.layout, table=dataclasses.replace(case.layout.table, cached=None))
    attention = TritonAttention(case.needs, backend.ops)
    walk = attention.search(layout, case.cache, width=max(widths), num_kept=len(widths) - 1)
    suffix = walk.suffix_keys, walk.suffix_values
    for part in suffix:
        part.fill_(7.5)
    for number, width in enumerate(widths):
        rows = len(lengths) * width
        before = [host(part).clone() for part in suffix]
        product = torch.from_numpy(rng.standard_normal((rows, sum(heads) + heads[1], DIM))).float()
        own = product.split((heads[0], heads[1], heads[1]), 1)
        places = [length + number for length in lengths for _ in range(width)]
        rotation, (_, key, value) = turned_rows(backend, own, places, rng)
        ancestors = torch.from_numpy(rng.integers(0, len(lengths) * widths[0], (rows, number)))
        last = number == len(widths) - 1
        plan = walk.step(move(ancestors), last=last)
        assert plan.rotates
        assert (plan.target(layer) is None) == last
        stores.clear()
        plan.run_product(layer, *move(product).split((heads[0], heads[1], heads[1]), 1), rotation)
        for part, old, new in zip(suffix, before, (key, value), strict=True):
            if not last:  # only this layer's, this pass's, and of rows that there are
                torch.testing.assert_close(host(part)[layer, number, :rows], new, rtol=1e-5, atol=1e-5)
                old[layer, number, :rows] = host(part)[layer, number, :rows]
            assert torch.equal(host(part).view(torch.uint8), old.view(torch.uint8))
            if INTERPRETED:
                begin, size = part.data_ptr(), part.element_size()
                there = sorted(at for at in stores if begin <= at < begin + part.numel() * size)
                first = begin + (layer * len(part[0]) + number) * part[0, 0].numel() * size
                num = 0 if last else rows * heads[1] * DIM
                assert there == [first + each * size for each in range(num)], "each once"
        assert stores or not INTERPRETED


def test_plans_that_cut_no_prompt_do_not_rotate(backend):
    case = draw(backend, [(0, 40)] * 40, (4, 2))
    walk = TritonAttention(case.needs, backend.ops).search(case.layout, case.cache, width=6, num_kept=1)
    ancestors = backend.runtime.to_device(torch.zeros((240, 0), dtype=torch.int64))
    assert not walk.step(ancestors, last=False).rotates


@pytest.mark.parametrize("window", [1, 3, 100])
def test_windows_of_beams(backend, window):
    check_search(search(backend, (300, 4), (3, 5, 5), window=window))


def test_soft_cap_of_beams(backend):
    check_search(search(backend, (300, 4), (5, 5), soft_cap=1.5))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_beams_read_a_cache_of_fewer_bits(backend, cache_dtype):
    check_search(search(backend, (300, 4), (5, 5), cache_dtype=cache_dtype))


@pytest.mark.parametrize("dtype", list(dict.fromkeys([*DTYPES, torch.float16])))
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize(
    ("heads", "widths"), [((2, 2), (2, 6, 6)), ((4, 1), (5,)), ((6, 3), (3, 3)), ((20, 4), (3, 3, 3, 3))]
)
def test_own_tokens_join_what_another_reader_found(backend, heads, widths, soft_cap, dtype):
    """Of one block of heads, of a part of one, and of more than one; a first pass over fewer beams goes through our own."""
    others = []
    check_search(
        search(backend, (30, 1, 70), widths, heads=heads, soft_cap=soft_cap, dtype=dtype, others=others), dtype
    )
    assert others[0].num_calls == widths.count(max(widths))


@pytest.mark.parametrize("requests", [[(16, 1100)], [(0, 1100), (16, 1)]])
def test_what_is_not_cut_has_no_parts_to_be_read(backend, requests):
    """There may be fewer rows of parts than such prompts have: reading behind them ends the interpreter's process here."""
    case = draw(backend, requests, (2, 1))
    plan = TritonAttention(case.needs, backend.ops).packed(case.layout, case.cache)
    reader = plan._reader
    if INTERPRETED:
        reader._part, reader._part_top = before_a_wall(reader._part), before_a_wall(reader._part_top)
    found = plan.run(0, *packed_rows(case, 0, backend.runtime.to_device))
    assert torch.isfinite(found[: sum(new for _, new in requests)]).all()


def before_a_wall(tensor):
    """Uninitialised memory for as many numbers, behind whose last one no memory may be touched for 64 MiB."""
    size, page, wall = tensor.numel() * tensor.element_size(), mmap.PAGESIZE, 1 << 26
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    room = -(-size // page) * page
    readable, private_and_anonymous = 3, 0x22
    begin = libc.mmap(None, ctypes.c_size_t(room + wall), readable, private_and_anonymous, -1, ctypes.c_long(0))
    assert libc.mprotect(ctypes.c_void_p(begin + room), ctypes.c_size_t(wall), 0) == 0
    memory = (ctypes.c_char * size).from_address(begin + room - size)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("widths", [(3, 5), (35,)])
def test_pages_change_nothing(backend, widths):
    paged, packed = (search(backend, (300, 0, 40), widths, paged=paged) for paged in (True, False))
    for found, expected in zip(paged.found, packed.found, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_list_of_work(backend):
    """Every query row of a request meets every key of its prompt once, and partial results do not overlap."""
    rng = np.random.default_rng(3)
    move, host = backend.runtime.to_device, backend.runtime.to_host
    for number in range(16):
        places = int(rng.integers(1, 90 if number % 8 == 0 else 9))
        new = rng.integers(0, rng.choice([4, 40, 400]), places) * rng.integers(0, 2, places)
        cached = rng.integers(0, 2000, places) * rng.integers(0, 2, places)
        width = int(rng.choice([0, 0, 1, 40, 500]))
        keys = cached if width else new + cached * (new > 0)
        rows = np.full(places, width) if width else new
        group, tile = int(rng.choice([1, 2, 3])), int(rng.choice([16, 64, 128]))
        least = int(rng.choice([64, 128, 0 if width == 0 else 64]))
        num_rows, longest = int(rows.sum()) + SPARE * (width == 0), int(keys.max()) + 5
        work = list_work(
            move(torch.from_numpy(keys if width else new)), num_rows, tile=tile, group=group, width=width,
            cached=None if width else move(torch.from_numpy(cached * (new > 0))), longest=longest, least=least,
        )  # fmt: skip
        items = host(work.items)[: int(host(work.count))].tolist()
        assert len(items) <= work.max_items
        first = np.cumsum(rows) - rows
        owner = [request for request in range(places) for _ in range(rows[request])]
        assert host(work.owner).tolist() == (owner + [-1] * (num_rows - len(owner)) if least else [])
        parts = np.zeros(work.num_parts, int)
        for request, (spans, first_part, count, row) in enumerate(host(work.requests).tolist()):
            assert (count, row) == (rows[request], first[request])
            assert spans <= max(work.max_spans, 1)
            if spans > 1:
                of_spans = [first_part + span * count for span in range(spans)]
                if width:
                    of_spans = [row + span * num_rows for span in range(spans)]
                for begin in of_spans:
                    parts[begin : begin + count] += 1
                assert of_spans[-1] + count <= work.num_parts
            mine = [item for item in items if item[0] == request]
            taken = width or (keys[request] and (cached[request] > 0) == (least > 0))
            tiles = -(-rows[request] * group // tile) if taken else 0
            assert len(mine) == tiles * spans
            if mine and spans > 1:
                assert width or cached[request]
                assert len(mine) <= (min(MOST_ITEMS, ITEMS_OF_SEARCH // places) if width else MOST_ITEMS)
            for of_tile in range(tiles):
                of_span = [item for item in mine if item[1] == of_tile]
                assert [item[2] for item in of_span] == [0, *(item[3] for item in of_span[:-1])]
                assert of_span[-1][3] == keys[request]
                outs = [row + span * num_rows if width else -1 for span in range(spans)]
                if spans > 1:
                    outs = of_spans
                assert [item[4:] for item in of_span] == [
                    [out, count, row, keys[request] if width else keys[request] - count] for out in outs
                ]
        assert (parts <= 1).all()
