"""Rows into the caches, copies of pages within them, and where packed rows belong."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import store

CHUNK = 4096  # values of a page that a program moves
BLOCK = 256  # rows that a program locates at a time
MOST_SPLITS = 64  # programs of a sequence


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


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def _locate(
    lengths,
    cached,
    pages,
    positions,
    slots,
    last,
    num_requests,
    num_tokens,
    pages_stride,
    PAGE_SIZE: tl.constexpr,
    CACHED: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs (request, split): every so many blocks of the request's rows. The request behind the last one has the rows that
    belong to none."""
    request = tl.program_id(0)
    split = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    start = request * 0
    for first in range(0, request, BLOCK):
        start += tl.sum(tl.load(lengths + first + lane, mask=first + lane < request, other=0).to(tl.int32), 0)
    there = request < num_requests
    end = start + tl.load(lengths + request, mask=there, other=0).to(tl.int32)
    before = request * 0
    if CACHED:
        before = tl.load(cached + request, mask=there, other=0).to(tl.int32)
    if split == 0:
        tl.store(last + request, tl.maximum(end - 1, 0).to(tl.int64), mask=there)
    bound = tl.minimum(tl.where(there, end, num_tokens), num_tokens)
    for first in range(start + split * BLOCK, bound, tl.num_programs(1) * BLOCK):
        row = first + lane
        inside = row < bound
        owned = row < end
        position = tl.where(owned, row - start + before, 0)
        slot = row.to(tl.int64)
        if PAGED:
            place = pages + request.to(tl.int64) * pages_stride + position // PAGE_SIZE
            page = tl.load(place, mask=owned, other=0).to(tl.int64)
            slot = page * PAGE_SIZE + tl.where(owned, position, row) % PAGE_SIZE
        tl.store(positions + row, position.to(tl.int64), mask=inside)
        tl.store(slots + row, slot, mask=inside)


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


def locate(
    lengths: Tensor,
    cached: Tensor | None,
    pages: Tensor | None,
    page_size: int,
    positions: Tensor,
    slots: Tensor,
    last: Tensor,
) -> None:
    """Fills positions and slots int64 [T], and last int64 [R]."""
    requests, tokens = len(lengths), len(positions)
    if pages is not None and pages.stride(1) != 1:
        pages = pages.contiguous()
    _locate[(requests + 1, max(min(triton.cdiv(tokens, BLOCK), MOST_SPLITS), 1))](
        lengths.contiguous(),
        None if cached is None else cached.contiguous(),
        pages,
        positions,
        slots,
        last,
        requests,
        tokens,
        0 if pages is None else pages.stride(0),
        PAGE_SIZE=page_size,
        CACHED=cached is not None,
        PAGED=pages is not None,
        BLOCK=BLOCK,
    )
