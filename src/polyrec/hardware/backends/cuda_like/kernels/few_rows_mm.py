"""The product of few e4m3 rows and an e4m3 weight, a scale for each row and each channel: as many programs as multiprocessors.

Where the inputs are cut, each part's sums are stored in fp32 and another kernel adds them up in order, so results repeat: the
one here, or that of the norm which follows (`norm.py`).
On an H200 it takes 5.1 to 11 us for 50 rows and each of the 1.7B model's weights, where torch takes 9 to 18
(`benchmarks/results/few_rows_mm.json`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..ops.few_rows import Tiling
from .early import early, let_next_begin, wait_for_earlier

SUM_COLUMNS = 512


@triton.jit(do_not_specialize=["rows", "blocks"])
def few_rows_scaled_mm_kernel(
    q, q_scale, weight, weight_scale, bias, out, rows, outputs, inputs, q_stride, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SPLIT: tl.constexpr, RAGGED: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs (tile of rows, tile of columns, split) of `blocks` x DEPTH inputs -> out [rows, outputs], or with SPLIT sums
    fp32 [splits, rows, outputs]. RAGGED: the last block reaches beyond the inputs."""
    wait_for_earlier(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    step = tl.arange(0, DEPTH)
    # Rows beyond the end are not read: they would cost as much as others. Columns there repeat the last.
    is_row = (row < rows)[:, None]
    begin = split * blocks * DEPTH
    column_read = tl.minimum(column, outputs - 1).to(tl.int64)
    left = q + (row.to(tl.int64) * q_stride)[:, None] + (begin + step)[None, :]
    right = weight + (column_read * inputs)[:, None] + (begin + step)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if not SPLIT:  # what the end needs is there by then; loaded there it would be one more trip to memory
        by_row = tl.load(q_scale + row, mask=row < rows, other=0.0)[:, None]
        by_column = tl.load(weight_scale + column, mask=column < outputs, other=0.0)[None, :]
        if bias is not None:
            offset = tl.load(bias + column, mask=column < outputs, other=0.0)[None, :]
    for block in range(blocks):
        if RAGGED:
            is_input = (begin + block * DEPTH + step < inputs)[None, :]
            a = tl.load(left, mask=is_row & is_input, other=0.0)
            b = tl.load(right, mask=is_input, other=0.0)
        else:
            a = tl.load(left, mask=is_row, other=0.0)
            b = tl.load(right)
        if EXACT:
            # Hopper sums e4m3 products in about 14 bits (DeepSeek-V3, 2024), fp16 ones in fp32; fp16 holds every e4m3 number.
            a, b = a.to(tl.float16), b.to(tl.float16)
        total = tl.dot(a, tl.trans(b), total)
        left += DEPTH
        right += DEPTH
    let_next_begin(EARLY)
    inside = is_row & (column < outputs)[None, :]
    if SPLIT:
        out += split.to(tl.int64) * rows * outputs
    else:
        total = total * by_row * by_column
        if bias is not None:
            total += offset.to(tl.float32)
    place = out + (row.to(tl.int64) * outputs)[:, None] + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_parts(
    partial, q_scale, weight_scale, bias, row, first, rows, outputs, SPLITS: tl.constexpr, COLUMNS: tl.constexpr
):
    """What `sum_of_parts` takes, of rows [R] and COLUMNS columns from `first` on: each part's sums of fp32 [SPLITS, rows,
    outputs], both scales and the bias. A shape of its own makes loads of whole lines, however the caller lays rows out."""
    column = first + 4 * tl.arange(0, COLUMNS // 4)[None, :, None] + tl.arange(0, 4)[None, None, :]
    row = row.to(tl.int64)[:, None, None]
    is_row, is_column = row < rows, column < outputs
    place = partial + row * outputs + column
    loaded = ()
    for split in tl.static_range(SPLITS):
        part = tl.load(place + split * rows.to(tl.int64) * outputs, mask=is_row & is_column, other=0.0)
        loaded = loaded + (part,)  # type: ignore[assignment]  # noqa: RUF005
    by_row = tl.load(q_scale + row, mask=is_row, other=0.0)
    by_column = tl.load(weight_scale + column, mask=is_column, other=0.0)
    loaded = loaded + (by_row, by_column)  # type: ignore[assignment]  # noqa: RUF005
    if bias is not None:
        offset = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        loaded = loaded + (offset,)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@triton.jit
def sum_of_parts(loaded, BIAS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr):
    """-> the product's values, fp32 [R, COLUMNS]: parts added from the first to the last, scaled by row and by channel, plus
    bias where there is one."""
    total = loaded[0]
    for split in tl.static_range(1, SPLITS):
        total += loaded[split]
    total *= loaded[SPLITS]
    total *= loaded[SPLITS + 1]
    if BIAS:
        total += loaded[SPLITS + 2]
    return total.reshape(total.shape[0], COLUMNS)


@triton.jit(do_not_specialize=["rows"])
def few_rows_scaled_mm_sum_kernel(
    partial, q_scale, weight_scale, bias, out, rows, outputs,
    SPLITS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs (row, tile of columns) -> out [rows, outputs]."""
    wait_for_earlier(EARLY)
    row = tl.program_id(0) + tl.arange(0, 1)
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    loaded = load_parts(partial, q_scale, weight_scale, bias, row, first, rows, outputs, SPLITS, COLUMNS)
    total = sum_of_parts(loaded, bias is not None, SPLITS, COLUMNS)
    let_next_begin(EARLY)
    place = out + (row.to(tl.int64) * outputs)[:, None] + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(column < outputs)[None, :])


def few_rows_scaled_mm(
    q: Tensor,
    q_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiling: Tiling,
    *,
    exact: bool,
) -> None:
    """Fills out [T, out], or where the inputs are cut fp32 [splits, T, out] with the parts' sums, neither scaled nor with the
    bias. The arguments are those of `LinearOps.scaled_mm`, but rows of q may be views of wider ones. exact: sums in fp32."""
    (rows, inputs), outputs = q.shape, len(weight)
    tall, wide, splits, depth, stages, warps = tiling
    blocks = triton.cdiv(inputs, depth * splits)
    few_rows_scaled_mm_kernel[(triton.cdiv(rows, tall), triton.cdiv(outputs, wide), splits)](
        q,
        q_scale,
        weight,
        weight_scale,
        bias,
        out,
        rows,
        outputs,
        inputs,
        q.stride(0),
        blocks,
        ROWS=tall,
        COLUMNS=wide,
        DEPTH=depth,
        SPLIT=splits > 1,
        RAGGED=inputs % (depth * splits) != 0,
        EXACT=exact,
        **early(),
        num_warps=warps,
        num_stages=stages,
    )


def few_rows_scaled_mm_sum(
    partial: Tensor, q_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Fills out [T, out] from the parts' sums, fp32 [splits, T, out]."""
    splits, rows, outputs = partial.shape
    few_rows_scaled_mm_sum_kernel[(rows, triton.cdiv(outputs, SUM_COLUMNS))](
        partial,
        q_scale,
        weight_scale,
        bias,
        out,
        rows,
        outputs,
        SPLITS=splits,
        COLUMNS=SUM_COLUMNS,
        **early(),
        num_warps=4,
    )
