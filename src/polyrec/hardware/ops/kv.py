"""Key-value cache ops and their meaning. A cache is rows [slots, KV, D]; a page is page_size rows that follow each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .draw import Draw
from .linear import FP8_MAX
from .spec import FP8, INFER, Case, Lookup, op, reference_group


@dataclass(frozen=True)
class Located:
    """Where the rows of packed sequences belong. positions: int64 [T], each row's place in its prompt, cached tokens counted; 0
    for a row without a sequence. slots: int64 [T], the slot of the cache that its key and value go to. last: int64 [R], each
    sequence's last row; of a place without a sequence the last row before it, or row 0."""

    positions: Tensor
    slots: Tensor
    last: Tensor


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """key and value [T, KV, D] go to rows `slots` int64 [T] of the caches [slots, KV, D]; slots are distinct.

    Caches of another dtype get the values converted; e4m3 ones saturated at ±448, with no scale.
    """
    for rows, cache in ((key, key_cache), (value, value_cache)):
        if cache.dtype == FP8:  # torch's CPU can index bytes, not e4m3
            rows = rows.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
            cache = cache.view(torch.uint8)
        cache.index_copy_(0, slots, rows.to(cache.dtype))


def copy_pages(key_cache: Tensor, value_cache: Tensor, source: Tensor, target: Tensor, page_size: int) -> None:
    """Pages `source` of both caches [slots, KV, D] go to pages `target`, both int64 [N]; targets are distinct.

    Every source is read before a target is written, so a page may be both.
    """
    for cache in (key_cache, value_cache):
        pages = cache.unflatten(0, (-1, page_size))
        pages[target] = pages[source]


def page_rows(pages: Tensor, page_size: int) -> Tensor:
    """Page numbers int64 [N] -> their rows int64 [N · page_size]."""
    return (pages[:, None] * page_size + torch.arange(page_size, device=pages.device)).flatten()


def locate(lengths: Tensor, cached: Tensor | None, pages: Tensor | None, page_size: int, num_tokens: int) -> Located:
    """Of R sequences, packed one after another into num_tokens rows; rows after the last sequence belong to none.

    lengths: int64 [R], zero for a place without a sequence. cached: int64 [R], tokens of each prompt before its first row;
    None: none. pages: int32 [R, P], token t of prompt r lies in slot pages[r, t // page_size] · page_size + t % page_size, and
    page 0 takes rows without a sequence; None: row t goes to slot t.
    """
    ends = torch.cumsum(lengths, 0)
    row = torch.arange(num_tokens, device=lengths.device)
    sequence = torch.searchsorted(ends, row, right=True)
    owned = sequence < len(lengths)
    sequence = torch.where(owned, sequence, 0)
    position = row - (ends - lengths)[sequence]
    if cached is not None:
        position = position + cached[sequence]
    position = torch.where(owned, position, 0)
    slot = row
    if pages is not None:
        slot = pages[sequence, position // page_size] * page_size + position % page_size
        slot = torch.where(owned, slot, row % page_size)
    return Located(position, slot, (ends - 1).clamp_min(0))


def _write_cases(draw: Draw) -> Iterator[Case]:
    for rows, heads, dim, slots in ((3, 2, 16, 8), (17, 4, 64, 40))[: 2 if draw.full else 1]:
        yield {
            "key": draw.normal(rows, heads, dim),
            "value": draw.normal(rows, heads, dim),
            "key_cache": draw.normal(slots, heads, dim),
            "value_cache": draw.normal(slots, heads, dim),
            "slots": draw.distinct(slots, rows),
        }


def _copy_pages_cases(draw: Draw) -> Iterator[Case]:
    for pages, page_size, copies in ((6, 2, 3), (12, 16, 5))[: 2 if draw.full else 1]:
        yield {
            "key_cache": draw.normal(pages * page_size, 2, 16),
            "value_cache": draw.normal(pages * page_size, 2, 16),
            "source": draw.integers(0, pages, copies),
            "target": draw.distinct(pages, copies),
            "page_size": page_size,
        }


def _locate_cases(draw: Draw) -> Iterator[Case]:
    for requests, page_size, spare, prefix in ((3, 4, 5, True), (7, 16, 0, True), (4, 3, 2, False)):
        lengths, cached = draw.integers(0, 12, requests), draw.integers(0, 9, requests)
        lengths[-2] = 0  # a place without a sequence, and not the last one
        columns = -(-20 // page_size)
        yield {
            "lengths": lengths,
            "cached": cached if prefix else None,
            "pages": draw.distinct(requests * columns, requests, columns).int(),
            "page_size": page_size,
            "num_tokens": 11 * requests + spare,
        }
        if not draw.full:
            return
    yield {"lengths": draw.integers(0, 6, 4), "cached": None, "pages": None, "page_size": 1, "num_tokens": 30}


def _decompose_copy_pages(op: Lookup) -> Callable[..., None]:
    write = op("kv.write")

    def gather_then_write(
        key_cache: Tensor, value_cache: Tensor, source: Tensor, target: Tensor, page_size: int
    ) -> None:
        rows = page_rows(source, page_size)
        write(key_cache[rows], value_cache[rows], key_cache, value_cache, page_rows(target, page_size))

    return gather_then_write


@dataclass(frozen=True)
class KVOps:
    """Rows and pages of the key and value caches, stored in place, and where packed rows belong."""

    write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = field(
        metadata=op(
            write,
            "key, value [T, KV, D], key_cache, value_cache [slots, KV, D], slots int64 [T], distinct -> None",
            _write_cases,
            tier="R",
            writes=("key_cache", "value_cache"),
            modes=INFER,
            strided=("key", "value"),
        )
    )
    copy_pages: Callable[[Tensor, Tensor, Tensor, Tensor, int], None] = field(
        metadata=op(
            copy_pages,
            "key_cache, value_cache [pages · page_size, KV, D], source, target int64 [N], targets distinct -> None",
            _copy_pages_cases,
            tier="D",
            writes=("key_cache", "value_cache"),
            modes=INFER,
            needs=("kv.write",),
            decompose=_decompose_copy_pages,
        )
    )
    locate: Callable[[Tensor, Tensor | None, Tensor | None, int, int], Located] = field(
        metadata=op(
            locate,
            "lengths int64 [R], cached int64 [R] or None, pages int32 [R, P] or None "
            "-> positions, slots int64 [T], last int64 [R]",
            _locate_cases,
            tier="D",
            dtypes=(torch.float32,),  # none of them is a float
            modes=INFER,
        )
    )


REFERENCE_KV_OPS = reference_group(KVOps)
