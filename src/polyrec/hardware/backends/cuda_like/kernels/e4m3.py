"""How kernels turn fp32 values into e4m3, as `ops.linear.quantize_fp8` does; and stores that convert."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(1.1754943508222875e-38)  # fp32's smallest normal number: what a row of zeros gets


@triton.jit
def scale_of(largest):
    """The fp32 scale of a row whose largest magnitude is given."""
    return tl.maximum(largest * (1.0 / LARGEST), SMALLEST_SCALE)


@triton.jit
def to_e4m3(values):
    """Saturating; a NaN stays one."""
    return tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def store(place, values, inside):
    """Stores fp32 values in the dtype that `place` points to."""
    if place.dtype.element_ty == tl.float8e4nv:
        tl.store(place, to_e4m3(values), mask=inside)
    else:
        tl.store(place, values.to(place.dtype.element_ty), mask=inside)
