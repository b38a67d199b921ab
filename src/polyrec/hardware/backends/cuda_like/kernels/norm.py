"""RMSNorm in one pass over a row: alone or of x + residual, the result as it is or as e4m3 with the row's scale.

x may also be the product of few rows whose inputs were cut: then the kernel adds up the parts' sums, and gives the bits that it
would give for the product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import scale_of, store, to_e4m3
from .early import early, let_next_begin, wait_for_earlier
from .few_rows_mm import load_parts, sum_of_parts
from .rows import Rows, rows_of, tile


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x,
    x_scale,
    channel_scale,
    bias,
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
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """SPLITS: x is the parts' sums, fp32 [SPLITS, rows, SIZE], of a product with scales and a bias or None; 0: x is whole."""
    wait_for_earlier(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    major, minor = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    row = row.to(tl.int64)
    place = (row * SIZE)[:, None] + column[None, :]
    # All loads are under way before the first value is waited for. Those of whole rows come after the parts': Triton keeps the
    # layout of the last for the row's sum, which is so added in one order, whatever x is.
    if SPLITS:
        loaded = load_parts(x, x_scale, channel_scale, bias, row, 0, rows, SIZE, SPLITS, COLUMNS)
    else:
        start = (major * x_outer + minor * x_inner)[:, None] + column[None, :]
        value = tl.load(x + start, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        start = (major * residual_outer + minor * residual_inner)[:, None] + column[None, :]
        stream = tl.load(residual + start, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(tl.broadcast_to((weight + column)[None, :], (ROWS, COLUMNS)), mask=inside, other=0.0).to(tl.float32)
    if SPLITS:
        value = sum_of_parts(loaded, bias is not None, SPLITS, COLUMNS)
        value = value.to(total.dtype.element_ty).to(tl.float32)  # as the product would be
    if ADD:
        # The norm sees the sum as the next layer will: rounded. So this path and the decomposed one agree.
        rounded = (value + stream).to(total.dtype.element_ty)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)
    value = value * inverse[:, None] * gain
    let_next_begin(EARLY)
    if FP8:
        own = scale_of(tl.max(tl.abs(value), 1))
        tl.store(out + place, to_e4m3(value * (1.0 / own)[:, None]), mask=inside)
        tl.store(scale + row, own, mask=row < rows)
    else:
        store(out + place, value, inside)
    if ADD:
        tl.store(total + place, rounded, mask=inside)


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
    _run(rows_of(x), (None, None, None), 0, residual, weight, eps, out, scale, total)


def rms_norm_of_parts(
    partial: Tensor,
    q_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    scale: Tensor,
    total: Tensor,
) -> None:
    """`rms_norm` of the product whose parts' sums are partial, fp32 [splits, T, D] (`few_rows_scaled_mm`)."""
    scales = q_scale, weight_scale, bias
    _run(Rows(partial, 1, 0, 0), scales, len(partial), residual, weight, eps, out, scale, total)


def _run(
    x: Rows,
    scales: tuple[Tensor | None, ...],
    splits: int,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    scale: Tensor | None,
    total: Tensor | None,
) -> None:
    size = out.shape[-1]
    added = x if residual is None else rows_of(residual)
    rows = out.numel() // size
    columns, rows_each, warps = tile(size)
    _rms_norm[(triton.cdiv(rows, rows_each),)](
        x.tensor,
        *scales,
        added.tensor,
        weight,
        out,
        scale,
        total,
        rows,
        added.inner,
        x.outer_stride,
        x.inner_stride,
        added.outer_stride,
        added.inner_stride,
        eps,
        SIZE=size,
        COLUMNS=columns,
        ROWS=rows_each,
        ADD=total is not None,
        FP8=scale is not None,
        SPLITS=splits,
        **early(),
        num_warps=warps,
    )
