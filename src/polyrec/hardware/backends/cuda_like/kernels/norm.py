"""RMSNorm in one pass over a row: alone or of x + residual, the result as it is or as e4m3 with the row's scale."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import scale_of, store, to_e4m3
from .rows import rows_of, tile


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x,
    residual,
    weight,
    out,
    scale,
    total,
    rows,
    inner,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    FP8: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    major, minor = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    row = row.to(tl.int64)
    place = (row * SIZE)[:, None] + column[None, :]
    start = (major * x_outer + minor * x_inner)[:, None] + column[None, :]
    value = tl.load(x + start, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        start = (major * residual_outer + minor * residual_inner)[:, None] + column[None, :]
        value += tl.load(residual + start, mask=inside, other=0.0).to(tl.float32)
        # The norm sees the sum as the next layer will: rounded. So this path and the decomposed one agree.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    gain = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)
    value = value * inverse[:, None] * gain[None, :]
    if FP8:
        own = scale_of(tl.max(tl.abs(value), 1))
        tl.store(scale + row, own, mask=row < rows)
        tl.store(out + place, to_e4m3(value * (1.0 / own)[:, None]), mask=inside)
    else:
        store(out + place, value, inside)


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    scale: Tensor | None,
    total: Tensor | None,
) -> None:
    """Fills out [..., D] from x [..., D]. residual: added first, the sum goes to total. scale: fp32 [..., 1], with out e4m3."""
    size = x.shape[-1]
    x, inner, x_outer, x_inner = rows_of(x)
    residual, _, residual_outer, residual_inner = (x, 0, 0, 0) if residual is None else rows_of(residual)
    rows = out.numel() // size
    columns, rows_each, warps = tile(size)
    _rms_norm[(triton.cdiv(rows, rows_each),)](
        x,
        residual,
        weight,
        out,
        scale,
        total,
        rows,
        inner,
        x_outer,
        x_inner,
        residual_outer,
        residual_inner,
        eps,
        SIZE=size,
        COLUMNS=columns,
        ROWS=rows_each,
        ADD=total is not None,
        FP8=scale is not None,
        num_warps=warps,
    )
