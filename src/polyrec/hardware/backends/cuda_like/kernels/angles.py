"""The angles of rotary positions: cosines and sines of all rows in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .early import early, let_next_begin, wait_for_earlier

BLOCK = 256  # angles of a program


@triton.jit(do_not_specialize=["count"])
def _angles(
    positions, inverse_frequency, cos, sin, count, HALF: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_earlier(EARLY)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    position = tl.load(positions + place // HALF, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(inverse_frequency + place % HALF, mask=inside, other=0.0)
    let_next_begin(EARLY)
    tl.store(cos + place, tl.cos(angle), mask=inside)
    tl.store(sin + place, tl.sin(angle), mask=inside)


def angles(positions: Tensor, inverse_frequency: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Fills cos and sin fp32 [T, D / 2]."""
    _angles[(triton.cdiv(cos.numel(), BLOCK),)](
        positions,
        inverse_frequency,
        cos,
        sin,
        cos.numel(),
        HALF=cos.shape[1],
        BLOCK=BLOCK,
        **early(),
        enable_fp_fusion=False,  # the product is rounded before anything is taken from it
    )
