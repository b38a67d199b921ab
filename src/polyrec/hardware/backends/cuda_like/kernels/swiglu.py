"""silu(gate) · up of rows [gate, up], the result as it is or as e4m3 with the row's scale."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import scale_of, store, to_e4m3
from .early import early, let_next_begin, wait_for_earlier

CHUNK = 2048  # values of a program where rows are cut
# Values at a time of a row that one program holds: loads of 16 bytes a lane where they make whole parts, else of 8.
PART, SMALL_PART = 2048, 1024
WHOLE = 8192  # the longest such row; of longer ones the inputs are read twice, the second time from a cache


MINUS_LOG2E: tl.constexpr = tl.constexpr(-1.4426950408889634)


@triton.jit
def sigmoid(x):
    """In base 2: with Triton's own, SwiGLU has a fifth more instructions, which by count take about as long as its bytes."""
    return 1.0 / (1.0 + tl.exp2(x * MINUS_LOG2E))


@triton.jit
def _activated(x, column, inside, SIZE: tl.constexpr):
    gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    return gate * sigmoid(gate) * up


@triton.jit
def _silu_and_mul(x, out, x_stride, SIZE: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_earlier(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < SIZE
    values = _activated(x + row * x_stride, column, inside, SIZE)
    let_next_begin(EARLY)
    store(out + row * SIZE + column, values, inside)


@triton.jit
def _silu_and_mul_fp8(
    x,
    out,
    scale,
    x_stride,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    HELD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row, in PARTS of CHUNK values, which it holds or computes twice."""
    wait_for_earlier(EARLY)
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * SIZE
    column = tl.arange(0, CHUNK)
    largest = tl.zeros([CHUNK], tl.float32)
    if HELD:
        values = ()
        for part in tl.static_range(PARTS):
            at = part * CHUNK + column
            # Triton knows no starred tuples, mypy no tuples that grow.
            values = values + (_activated(x, at, at < SIZE, SIZE),)  # type: ignore[assignment]  # noqa: RUF005
            largest = tl.maximum(largest, tl.abs(values[part]))
        own = scale_of(tl.max(largest, 0))
        let_next_begin(EARLY)
        for part in tl.static_range(PARTS):
            at = part * CHUNK + column
            tl.store(out + at, to_e4m3(values[part] * (1.0 / own)), mask=at < SIZE)
    else:
        for part in range(PARTS):
            at = part * CHUNK + column
            largest = tl.maximum(largest, tl.abs(_activated(x, at, at < SIZE, SIZE)))
        own = scale_of(tl.max(largest, 0))
        let_next_begin(EARLY)
        for part in range(PARTS):
            at = part * CHUNK + column
            tl.store(out + at, to_e4m3(_activated(x, at, at < SIZE, SIZE) * (1.0 / own)), mask=at < SIZE)
    tl.store(scale + row, own)


def silu_and_mul(x: Tensor, out: Tensor, scale: Tensor | None) -> None:
    """Fills out [N, I] from x [N, 2 I]. scale: fp32 [N, 1], with out e4m3."""
    rows, size = out.shape
    if scale is None:
        chunk = min(triton.next_power_of_2(size), CHUNK)
        _silu_and_mul[(rows, triton.cdiv(size, chunk))](
            x,
            out,
            x.stride(0),
            SIZE=size,
            CHUNK=chunk,
            **early(),
            num_warps=max(chunk // 512, 1),
        )
        return
    held = size <= WHOLE
    part = PART if size % PART == 0 else SMALL_PART
    chunk = min(triton.next_power_of_2(size), part if held else CHUNK)
    _silu_and_mul_fp8[(rows,)](
        x,
        out,
        scale,
        x.stride(0),
        SIZE=size,
        CHUNK=chunk,
        PARTS=triton.cdiv(size, chunk),
        HELD=held,
        **early(),
        num_warps=max(chunk // (256 if chunk == PART and held else 128), 1),
    )
