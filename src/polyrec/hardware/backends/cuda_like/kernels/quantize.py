"""Rows to e4m3 with their scales. A row that is too long for registers is read twice, the second time from a cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import scale_of, to_e4m3
from .early import early, let_next_begin, wait_for_earlier
from .rows import rows_of, tile

WHOLE = 16384  # the longest row that one program holds
CHUNK = 4096


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    x,
    out,
    scale,
    rows,
    inner,
    x_outer,
    x_inner,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_earlier(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    start = (row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner
    row = row.to(tl.int64)
    value = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    own = scale_of(tl.max(tl.abs(value), 1))
    let_next_begin(EARLY)
    tl.store(scale + row, own, mask=row < rows)
    tl.store(out + (row * SIZE)[:, None] + column[None, :], to_e4m3(value * (1.0 / own)[:, None]), mask=inside)


@triton.jit
def _quantize_long(x, out, scale, inner, x_outer, x_inner, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    x += (row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner
    out += row.to(tl.int64) * SIZE
    column = tl.arange(0, CHUNK)
    largest = tl.zeros([CHUNK], tl.float32)
    for begin in range(0, SIZE, CHUNK):
        value = tl.load(x + begin + column, mask=begin + column < SIZE, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    own = scale_of(tl.max(largest, 0))
    tl.store(scale + row, own)
    for begin in range(0, SIZE, CHUNK):
        inside = begin + column < SIZE
        value = tl.load(x + begin + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + begin + column, to_e4m3(value * (1.0 / own)), mask=inside)


def quantize(x: Tensor, out: Tensor, scale: Tensor) -> None:
    """Fills out e4m3 [..., D] and scale fp32 [...] from x [..., D]."""
    size = x.shape[-1]
    x, inner, x_outer, x_inner = rows_of(x)
    rows = scale.numel()
    if size > WHOLE:
        _quantize_long[(rows,)](x, out, scale, inner, x_outer, x_inner, SIZE=size, CHUNK=CHUNK, num_warps=8)
        return
    columns, rows_each, warps = tile(size)
    _quantize[(triton.cdiv(rows, rows_each),)](
        x,
        out,
        scale,
        rows,
        inner,
        x_outer,
        x_inner,
        SIZE=size,
        COLUMNS=columns,
        ROWS=rows_each,
        **early(),
        num_warps=warps,
    )
