"""The list of what an attention kernel's programs do, made once for all layers of a plan or a search.

A batch recorded in a graph has places without a sequence, and no prompt as long as the longest that it may hold; a grid over
all that might be would launch ten empty programs for each full one. The list is made on the device, so nothing is
synchronised. A prefill's prompts are cut by their own sizes, so nothing here depends on neighbours; a search's also by how many
requests it was recorded for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hardware.backends.cuda_like.kernels.early import early, let_next_begin, wait_for_earlier

MOST_ITEMS = 16  # spans · tiles that one prompt's reading is cut into: 8 kv heads then fill 128 multiprocessors
ITEMS_OF_SEARCH = (
    32  # the same of all prompts of a search, two a multiprocessor; each is cut once where this leaves no more
)

# Columns of an item, and of a request.
REQUEST: tl.constexpr = tl.constexpr(0)
TILE: tl.constexpr = tl.constexpr(1)
BEGIN: tl.constexpr = tl.constexpr(2)
END: tl.constexpr = tl.constexpr(3)
OUT: tl.constexpr = tl.constexpr(4)
ROWS_OF: tl.constexpr = tl.constexpr(5)
FIRST_ROW: tl.constexpr = tl.constexpr(6)
BEFORE: tl.constexpr = tl.constexpr(7)
ITEM_SIZE: tl.constexpr = tl.constexpr(8)
SPANS: tl.constexpr = tl.constexpr(0)
FIRST_PART: tl.constexpr = tl.constexpr(1)
PART_ROWS: tl.constexpr = tl.constexpr(2)
PART_ROW: tl.constexpr = tl.constexpr(3)
REQUEST_SIZE: tl.constexpr = tl.constexpr(4)


@dataclass(frozen=True)
class Work:
    """items: int32 [max_items, 8], of which the first `count` int32 [1] are there: request, tile of query rows, the span's
    first key, the one behind its last, row of its partial results (−1: it is not cut; of beams always there, behind the last
    span's rows of all requests), query rows of the request, the first of them, keys before the first of them.

    requests: int32 [R, 4]: spans, first row of partial results, query rows, the first of them. owner: int32 [rows], the request
    of a query row, −1 for a row that belongs to none; empty where nothing is cut. max_spans: at least the most spans of a
    request. num_parts: rows that partial results need at most.
    """

    items: Tensor
    count: Tensor
    requests: Tensor
    owner: Tensor
    max_items: int
    max_spans: int
    num_parts: int


def list_work(
    lengths: Tensor,
    num_rows: int,
    *,
    tile: int,
    group: int = 1,
    width: int = 0,
    cached: Tensor | None = None,
    longest: int = 0,
    least: int = 0,
) -> Work:
    """Of query rows against their requests' keys.

    lengths: int64 [R], query rows of each request, packed; they are the last of its keys. With `cached` int64 [R], which counts
    the keys before them, only requests that have such keys are listed, or where nothing is cut those that have none. With a
    `width`: keys of each request, which all of its `width` query rows see; a request without keys has an item all the same.

    num_rows: query rows of all. tile: of group · rows that one item takes. longest: at least the most keys of a request.
    least: keys of the smallest span; 0: nothing is cut.
    """
    device, requests = lengths.device, len(lengths)
    places = requests if width else min(requests, num_rows)
    tiles = triton.cdiv(width * group, tile) if width else 1
    most = MOST_ITEMS if least else 1
    if width:  # many prompts fill the device; how many there may be is known when the search is recorded
        most = max(tiles, min(most, ITEMS_OF_SEARCH // requests))
    # A request's tiles · spans are at most the larger of its tiles and `most`, hence at most their sum − 1.
    max_items = places * most + num_rows * group // tile
    max_spans = 1
    if least:
        smallest = least * min(tiles, 2)
        max_spans = max(1, min(most // tiles, triton.cdiv(longest, smallest)))
    # A request that is cut has at most most · tile // group rows of partial results: its spans · tiles are at most `most`.
    num_parts = num_rows * max_spans if width else min(num_rows * max_spans, places * most * tile // group)
    work = Work(
        items=torch.empty((max_items, ITEM_SIZE.value), dtype=torch.int32, device=device),
        count=torch.empty(1, dtype=torch.int32, device=device),
        requests=torch.empty((requests, REQUEST_SIZE.value), dtype=torch.int32, device=device),
        owner=torch.empty(num_rows if least else 0, dtype=torch.int32, device=device),
        max_items=max_items,
        max_spans=max_spans,
        num_parts=num_parts if max_spans > 1 else 0,
    )
    work_kernel[(requests,)](
        lengths, cached, work.items, work.count, work.requests, work.owner, num_rows, width, least,
        GROUP=group, TILE_ROWS=tile, MOST=most, BEAMS=width > 0, CACHED=cached is not None, CUT=least > 0,
        BLOCK=64, num_warps=2, **early(),
    )  # fmt: skip
    return work


@triton.jit
def _sizes(
    request, bound, lengths, cached, width, least,
    GROUP: tl.constexpr, TILE_ROWS: tl.constexpr, MOST: tl.constexpr,
    BEAMS: tl.constexpr, CACHED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """-> query rows, keys, tiles, keys of a span, and spans of requests; nothing from `bound` on."""
    there = request < bound
    rows = tl.load(lengths + request, mask=there, other=0).to(tl.int32)
    before = rows * 0
    if CACHED:
        before = tl.load(cached + request, mask=there, other=0).to(tl.int32)
    keys = rows + before
    if BEAMS:
        rows = tl.where(there, width, 0)
    tiles = (rows * GROUP + (TILE_ROWS - 1)) // TILE_ROWS
    size = keys
    if CUT:
        most = tl.maximum(MOST // tl.maximum(tiles, 1), 1)
        size = ((keys + most - 1) // most + 63) // 64 * 64  # whole blocks of keys
        size = tl.maximum(size, tl.minimum(tiles, 2) * least)
    if CACHED:
        listed = before > 0 if CUT else before == 0
        tiles = tl.where(listed, tiles, 0)
        size = tl.where(listed, size, keys)
    size = tl.maximum(size, 1)
    spans = (keys + size - 1) // size
    if BEAMS:
        spans = tl.where(there, tl.maximum(spans, 1), 0)
    return rows, keys, tiles, size, spans


@triton.jit(do_not_specialize=["num_rows", "width", "least"])
def work_kernel(
    lengths, cached, items, count, requests, owner, num_rows, width, least,
    GROUP: tl.constexpr, TILE_ROWS: tl.constexpr, MOST: tl.constexpr,
    BEAMS: tl.constexpr, CACHED: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request: its items go behind those of requests before it; the last tile, which sees most, is first."""
    wait_for_earlier(EARLY)
    request = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    first_item = request * 0
    first_row = request * 0
    first_part = request * 0
    for start in range(0, request, BLOCK):
        rows, keys, tiles, size, spans = _sizes(
            start + lane, request, lengths, cached, width, least,
            GROUP, TILE_ROWS, MOST, BEAMS, CACHED, CUT,
        )  # fmt: skip
        first_item += tl.sum(tiles * spans, 0)
        first_row += tl.sum(rows, 0)
        first_part += tl.sum(tl.where(spans > 1, rows * spans, 0), 0)
    rows, keys, tiles, size, spans = _sizes(
        request, request + 1, lengths, cached, width, least,
        GROUP, TILE_ROWS, MOST, BEAMS, CACHED, CUT,
    )  # fmt: skip
    let_next_begin(EARLY)
    num_items = tiles * spans
    before = keys - rows
    if BEAMS:
        before = keys
    for start in range(0, num_items, BLOCK):
        number = start + lane
        real = number < num_items
        span = number % spans
        at = items + (first_item + number) * ITEM_SIZE
        tl.store(at + REQUEST, request + lane * 0, mask=real)
        tl.store(at + TILE, tiles - 1 - number // spans, mask=real)
        tl.store(at + BEGIN, span * size, mask=real)
        tl.store(at + END, tl.minimum(span * size + size, keys), mask=real)
        out = tl.where(spans > 1, first_part + span * rows, -1)
        if BEAMS:  # where a span's rows lie follows from its number alone, and whoever merges need not look it up
            out = first_row + span * num_rows
        tl.store(at + OUT, out, mask=real)
        tl.store(at + ROWS_OF, rows + lane * 0, mask=real)
        tl.store(at + FIRST_ROW, first_row + lane * 0, mask=real)
        tl.store(at + BEFORE, before + lane * 0, mask=real)
    at = requests + request * REQUEST_SIZE
    tl.store(at + SPANS, spans)
    tl.store(at + FIRST_PART, first_part)
    tl.store(at + PART_ROWS, rows)
    tl.store(at + PART_ROW, first_row)
    last = request == tl.num_programs(0) - 1
    if last:
        tl.store(count, first_item + num_items)
    if CUT:
        for start in range(0, rows, BLOCK):
            number = start + lane
            tl.store(owner + first_row + number, request + lane * 0, mask=number < rows)
        if last:
            for start in range(first_row + rows, num_rows, BLOCK):
                number = start + lane
                tl.store(owner + number, lane * 0 - 1, mask=number < num_rows)
