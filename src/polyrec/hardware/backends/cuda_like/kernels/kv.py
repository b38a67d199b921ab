"""Rows into the caches, and copies of pages within them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import store

CHUNK = 4096  # values of a page that a program moves


@triton.jit
def _write(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_stride,
    value_stride,
    key_cache_stride,
    value_cache_stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < SIZE
    row = tl.load(key + token * key_stride + column, mask=inside, other=0.0).to(tl.float32)
    store(key_cache + slot * key_cache_stride + column, row, inside)
    row = tl.load(value + token * value_stride + column, mask=inside, other=0.0).to(tl.float32)
    store(value_cache + slot * value_cache_stride + column, row, inside)


@triton.jit
def _move_pages(
    key_from,
    value_from,
    key_to,
    value_to,
    pages,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Copy n: page pages[n] to place n where GATHER, else place n to page pages[n]."""
    number = tl.program_id(0).to(tl.int64)
    page = tl.load(pages + number).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < SIZE
    if GATHER:
        source, target = page * SIZE + column, number * SIZE + column
    else:
        source, target = number * SIZE + column, page * SIZE + column
    tl.store(key_to + target, tl.load(key_from + source, mask=inside), mask=inside)
    tl.store(value_to + target, tl.load(value_from + source, mask=inside), mask=inside)


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Rows of key and value [T, KV, D], whose heads follow each other, to `slots` int64 [T] of the caches [slots, KV, D]."""
    size = key.shape[1] * key.shape[2]
    columns = triton.next_power_of_2(size)
    _write[(len(key),)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        SIZE=size,
        COLUMNS=columns,
        num_warps=min(max(columns // 512, 1), 8),
    )


def copy_pages(
    key_cache: Tensor, value_cache: Tensor, source: Tensor, target: Tensor, size: int, staged: tuple[Tensor, Tensor]
) -> None:
    """Pages `source` to pages `target`, both int64 [N], of `size` values, through `staged`: two of [N, size].

    A page may be source and target at once, and programs run in any order, so all are read before one is written.
    """
    chunk = min(triton.next_power_of_2(size), CHUNK)
    grid = (len(source), triton.cdiv(size, chunk))
    warps = max(chunk // 512, 1)
    _move_pages[grid](key_cache, value_cache, *staged, source, SIZE=size, CHUNK=chunk, GATHER=True, num_warps=warps)
    _move_pages[grid](*staged, key_cache, value_cache, target, SIZE=size, CHUNK=chunk, GATHER=False, num_warps=warps)
