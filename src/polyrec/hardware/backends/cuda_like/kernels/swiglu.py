"""silu(gate) · up of rows [gate, up], the result as it is or as e4m3 with the row's scale."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ....early_launch import begin_early, early
from .e4m3 import scale_of, store, to_e4m3

CHUNK = 2048  # values of a program where rows are cut
WHOLE = (
    8192  # the longest row whose results one program holds; of longer ones the inputs are read twice, then from a cache
)


@triton.jit
def _activated(x, column, inside, SIZE: tl.constexpr):
    gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _silu_and_mul(x, out, x_stride, SIZE: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < SIZE
    store(out + row * SIZE + column, _activated(x + row * x_stride, column, inside, SIZE), inside)


@triton.jit
def _silu_and_mul_fp8(x, out, scale, x_stride, SIZE: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * SIZE
    column = tl.arange(0, CHUNK)
    if SIZE <= CHUNK:
        inside = column < SIZE
        value = _activated(x, column, inside, SIZE)
        own = scale_of(tl.max(tl.abs(value), 0))
        tl.store(out + column, to_e4m3(value * (1.0 / own)), mask=inside)
    else:
        largest = tl.zeros([CHUNK], tl.float32)
        for begin in range(0, SIZE, CHUNK):
            value = _activated(x, begin + column, begin + column < SIZE, SIZE)
            largest = tl.maximum(largest, tl.abs(value))
        own = scale_of(tl.max(largest, 0))
        for begin in range(0, SIZE, CHUNK):
            inside = begin + column < SIZE
            value = _activated(x, begin + column, inside, SIZE)
            tl.store(out + begin + column, to_e4m3(value * (1.0 / own)), mask=inside)
    tl.store(scale + row, own)


def silu_and_mul(x: Tensor, out: Tensor, scale: Tensor | None) -> None:
    """Fills out [N, I] from x [N, 2 I]. scale: fp32 [N, 1], with out e4m3."""
    rows, size = out.shape
    if scale is None:
        chunk = min(triton.next_power_of_2(size), CHUNK)
        _silu_and_mul[(rows, triton.cdiv(size, chunk))](
            x, out, x.stride(0), SIZE=size, CHUNK=chunk, num_warps=max(chunk // 512, 1), **early(out.device)
        )
        return
    chunk = triton.next_power_of_2(size) if size <= WHOLE else CHUNK
    warps = min(max(chunk // 512, 1), 16)
    _silu_and_mul_fp8[(rows,)](x, out, scale, x.stride(0), SIZE=size, CHUNK=chunk, num_warps=warps, **early(out.device))
