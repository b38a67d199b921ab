"""Where the rows of a tensor [..., D] lie, for kernels that take views without copying them."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

BUFFERS = 48 << 10  # of shared memory, which every device has, and an H200 for each of four programs


class Rows(NamedTuple):
    """Row r begins at (r // inner) · outer_stride + (r % inner) · inner_stride of the tensor; its values follow each other."""

    tensor: Tensor
    inner: int
    outer_stride: int
    inner_stride: int


def rows_of(x: Tensor) -> Rows:
    """Rows along the last dim. Views [N, D] and [N, M, D] are taken as they are; others are copied where they must be."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 2:
        return Rows(x, 1, x.stride(0), 0)
    if x.dim() == 3:
        return Rows(x, x.shape[1], x.stride(0), x.stride(1))
    x = x.reshape(-1, x.shape[-1])
    return Rows(x, 1, x.stride(0), 0)


def tile(size: int, values: int = 1024) -> tuple[int, int, int]:
    """-> (columns, rows, warps) of a program that holds whole rows of `size` values, at least `values` in all.

    A lane gets 16 values, two loads of 16 bytes in bf16, until there are 16 warps.
    """
    columns = triton.next_power_of_2(size)
    rows = max(values // columns, 1)
    return columns, rows, min(max(columns * rows // 512, 1), 16)


def stages(wanted: int, size: int) -> int:
    """Stages of a loop whose steps read `size` bytes each: as many as wanted, or 1 where buffers for all but one do not fit."""
    return wanted if (wanted - 1) * size <= BUFFERS else 1
