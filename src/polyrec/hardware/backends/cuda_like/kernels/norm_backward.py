"""The backward pass of RMSNorm in one pass over the rows, with the residual stream's gradient and the normed rows again.

A program takes every so many-th tile of rows, while the next ones' values are on their way, and sums its part of the weight's
gradient in registers. The parts are summed afterwards, in a fixed order: two runs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import store
from .rows import stages, tile

# With 3 stages the fastest of 512, 1,024 and 2,048 on an H200: 100 us for 16,384 rows of 2,048, where 512 take 110.
PROGRAMS = 1024
STAGES = 3  # one less than the tiles whose values a program has or waits for; 1: it asks for no tile before its turn


@triton.jit(do_not_specialize=["rows", "steps"])
def _rms_norm_backward(
    x,
    weight,
    by_normed,
    by_total,
    x_gradient,
    weight_gradient,
    normed,
    rows,
    steps,
    x_stride,
    normed_stride,
    total_stride,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TOTAL: tl.constexpr,
    AGAIN: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    gain = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    part = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        row = (step * programs + program) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < SIZE)[None, :]
        row = row.to(tl.int64)
        value = tl.load(x + (row * x_stride)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        own = tl.load(by_normed + (row * normed_stride)[:, None] + column[None, :], mask=inside, other=0.0)
        own = own.to(tl.float32)
        if TOTAL:  # asked for before the sums, which wait for all of a row
            stream = tl.load(by_total + (row * total_stride)[:, None] + column[None, :], mask=inside, other=0.0)
        pulled = own * gain
        # Neither sum waits for the other: what the norm divides by comes in behind both.
        square, pull = tl.sum(value * value, 1), tl.sum(pulled * value, 1)
        inverse = tl.rsqrt(square / SIZE + eps)
        slope = (pull / SIZE * inverse * inverse)[:, None]
        inverse = inverse[:, None]
        unit = value * inverse
        gradient = (pulled - value * slope) * inverse
        if TOTAL:
            gradient += stream.to(tl.float32)
        place = (row * SIZE)[:, None] + column[None, :]
        store(x_gradient + place, gradient, inside)
        if AGAIN:
            store(normed + place, unit * gain, inside)
        part += own * unit
    tl.store(weight_gradient + program * SIZE + column, tl.sum(part, 0), mask=column < SIZE)


def rms_norm_backward(
    x: Tensor, weight: Tensor, eps: float, by_normed: Tensor, by_total: Tensor | None, *, again: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, by_normed, by_total: [N, D], rows in one piece -> gradient of x [N, D] and of weight [D]; the normed rows again.

    by_normed: the gradient of the normed rows. by_total: of x itself, as the residual stream has it.
    """
    rows, size = x.shape
    columns, rows_each, warps = tile(size)
    tiles = triton.cdiv(rows, rows_each)
    programs = max(min(tiles, PROGRAMS), 1)
    x_gradient = x.new_empty((rows, size))
    parts = x.new_empty((programs, size), dtype=torch.float32)
    normed = x.new_empty((rows, size)) if again else None
    step_bytes = columns * rows_each * x.element_size() * (2 if by_total is None else 3)
    _rms_norm_backward[(programs,)](
        x,
        weight,
        by_normed,
        by_total,
        x_gradient,
        parts,
        normed,
        rows,
        triton.cdiv(tiles, programs),
        x.stride(0),
        by_normed.stride(0),
        0 if by_total is None else by_total.stride(0),
        eps,
        SIZE=size,
        COLUMNS=columns,
        ROWS=rows_each,
        TOTAL=by_total is not None,
        AGAIN=again,
        STAGES=stages(STAGES, step_bytes),
        num_warps=warps,
    )
    return x_gradient, parts.sum(0).to(weight.dtype), normed
