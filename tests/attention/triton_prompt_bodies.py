"""Prompts in pages, with and without a cached beginning, through our Triton attention: against float64, one query at a time.

`test_triton.py` runs this file in a process of its own, in Triton's interpreter or on a device.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import pytest
import torch

from polyrec.attention.triton import TritonAttention
from polyrec.hardware.backends.cpu import CpuBackend
from polyrec.hardware.backends.cuda_like import NvidiaBackend
from polyrec.hardware.base.attention import AttentionNeeds, PackedLayout, PageTable
from polyrec.hardware.ops.spec import FP8, TOLERANCES
from polyrec.testing.brute_force import attend, within

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DIM, SIZE, LAYERS, SPARE = 16, 16, 2, 5  # SPARE: rows behind the last sequence
HEADS = [(2, 2), (4, 2), (4, 1)]
# (cached, new) tokens of each request. A request is cut where its rows are few; (0, 0) is a place without a sequence.
FEW = [(300, 9), (0, 0), (0, 12), (513, 1), (16, 30)]
MIXED = [(0, 70), (320, 3), (0, 0), (48, 150), (0, 1), (1, 1)]
LONG = [(160, 300), (700, 20)]


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


@pytest.fixture(scope="module")
def backend():
    if INTERPRETED:
        return CpuBackend()
    built = NvidiaBackend()
    built.runtime.select(0)
    return built


def draw(backend, shapes, heads, *, dtype=torch.float32, cache_dtype=None, window=None, soft_cap=None, extra=0):
    """A case whose beginnings are in the cache. extra: tokens and places more than needed, as in a recorded batch."""
    rng = np.random.default_rng(len(shapes) + sum(map(sum, shapes)))
    move, (num_heads, kv_heads) = backend.runtime.to_device, heads
    needs = AttentionNeeds(LAYERS, *heads, DIM, dtype=dtype, sliding_window=window, soft_cap=soft_cap)
    cached, new = (torch.tensor(part) for part in zip(*shapes, strict=True))
    columns = int(-(-(cached + new).max() // SIZE)) + extra
    numbers = rng.permutation(np.arange(1, len(shapes) * columns + 1)).reshape(len(shapes), columns)
    used = np.arange(columns) < -(-(cached + new).numpy() // SIZE)[:, None]
    pages = torch.from_numpy(np.where(used, numbers, 0)).int()
    cache = Cache((len(shapes) * columns + 1) * SIZE, kv_heads, cache_dtype or dtype, backend.runtime.device)
    rows = [
        [
            tuple(
                torch.from_numpy(rng.standard_normal((sum(shape), count, DIM)) * 1.3).to(dtype)
                for count in (num_heads, kv_heads, kv_heads)
            )
            for shape in shapes
        ]
        for _ in range(LAYERS)
    ]
    table = PageTable(move(pages), SIZE, int((cached + new).max()) + extra, move(cached))
    for layer, requests in enumerate(rows):
        for (_, key, value), num, where in zip(requests, cached.tolist(), pages, strict=True):
            token = torch.arange(num)
            slots = move(where[token // SIZE].long() * SIZE + token % SIZE)
            backend.ops.kv.write(move(key[:num]), move(value[:num]), *cache.layer(layer), slots)
    layout = PackedLayout(move(new), int(new.max()) + extra, int(new.sum()) + SPARE, table=table)
    return Case(rows, layout, cache, needs)


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
        assert out.dtype == case.needs.dtype
        found.append(backend.runtime.to_host(out)[:-SPARE].split(case.layout.lengths.tolist()))
    return found


def through(tensor, dtype):
    """What a cache of another dtype keeps of keys or values."""
    return (tensor if dtype == tensor.dtype else tensor.float().clamp(-448, 448).to(dtype).float()).double()


def check_prefill(backend, case, *, slack=1.0):
    tolerance = TOLERANCES[case.needs.dtype]
    for layer, outs in enumerate(prefill(backend, case)):
        for (query, key, value), num, out in zip(case.rows[layer], cached_of(case), outs, strict=True):
            key, value = (through(part, case.cache.keys.dtype) for part in (key, value))
            for i, row in enumerate(out.double()):
                seen = within(case.needs.sliding_window, list(range(num + i + 1)))
                expected = attend(query[num + i].double(), key[seen], value[seen], case.needs.soft_cap)
                close = {"rtol": slack * tolerance.relative, "atol": slack * tolerance.absolute}
                torch.testing.assert_close(row, expected, **close)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("shapes", [FEW, MIXED, LONG])
def test_the_rest_of_prompts(backend, shapes, heads):
    check_prefill(backend, draw(backend, shapes, heads))


@pytest.mark.parametrize("window", [1, 7, 100, 400])
def test_windows_reach_into_the_cached_beginning(backend, window):
    for shapes in (FEW, MIXED):
        check_prefill(backend, draw(backend, shapes, (4, 2), window=window))


def test_soft_cap(backend):
    check_prefill(backend, draw(backend, FEW, (4, 2), soft_cap=1.5))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_a_cache_of_fewer_bits(backend, cache_dtype):
    for shapes in (FEW, MIXED):
        check_prefill(backend, draw(backend, shapes, (4, 2), cache_dtype=cache_dtype))
