"""The product of e4m3 rows and an e4m3 weight with a scale for 128 values of a row and for 128 x 128 of the weight.

Each block of 128 inputs is summed by the matrix units alone, then scaled and added up in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(128)
GROUP = tl.constexpr(8)  # tiles of rows that take the same weights one after another, while these are in the L2 cache


@triton.jit(do_not_specialize=["rows"])
def _block_scaled_mm(
    q,
    q_scale,
    weight,
    weight_scale,
    out,
    rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):
    blocks: tl.constexpr = IN // BLOCK
    columns: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    tiles = (rows + ROWS - 1) // ROWS
    program = tl.program_id(0)
    first = program // (GROUP * columns) * GROUP
    group = tl.minimum(tiles - first, GROUP)
    row_tile = first + program % (GROUP * columns) % group
    column_tile = program % (GROUP * columns) // group

    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, BLOCK)
    # Rows and columns beyond the end repeat others, and are not stored.
    row_read = (row % rows).to(tl.int64)
    left = q + (row_read * IN)[:, None] + step[None, :]
    right = weight + ((column % OUT).to(tl.int64) * IN)[None, :] + step[:, None]
    left_scale = q_scale + row_read * blocks
    right_scale = weight_scale + column_tile * COLUMNS // BLOCK * blocks
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(blocks):
        a, b = tl.load(left), tl.load(right)
        if EXACT:
            # Hopper sums e4m3 products in about 14 bits (DeepSeek-V3, 2024), fp16 ones in fp32; fp16 holds every e4m3 number.
            a, b = a.to(tl.float16), b.to(tl.float16)
        total += tl.dot(a, b) * (tl.load(left_scale + block) * tl.load(right_scale + block))[:, None]
        left += BLOCK
        right += BLOCK
    inside = (row < rows)[:, None] & (column < OUT)[None, :]
    place = out + (row.to(tl.int64) * OUT)[:, None] + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def block_scaled_mm(q: Tensor, q_scale: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor) -> None:
    """Fills out [T, out]; the arguments are those of `LinearOps.block_scaled_mm`, contiguous."""
    rows, columns = out.shape
    exact = out.dtype == torch.float32
    tall = 64 if rows <= 64 or exact else 128
    _block_scaled_mm[(triton.cdiv(rows, tall) * triton.cdiv(columns, 128),)](
        q,
        q_scale,
        weight,
        weight_scale,
        out,
        rows,
        OUT=columns,
        IN=q.shape[1],
        ROWS=tall,
        COLUMNS=128,
        EXACT=exact,
        num_warps=4 if tall == 64 else 8,
        num_stages=3,
    )
