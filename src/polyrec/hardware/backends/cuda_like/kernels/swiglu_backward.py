"""The backward pass of silu(gate) · up of rows [gate, up], in one pass over them.

torch.compile's own kernel cut rows at gate and up and read gate and the gradient for each: it took twice the time that its
bytes need, beside a second kernel that made the activations again for the next product's weight gradient (H200, 16,384
tokens). One pass reads three tensors and writes three, in the order of memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import store
from .swiglu import sigmoid

CHUNK = 1024  # values of a program: 8 a lane, 16 bytes of each of six tensors


@triton.jit
def _silu_and_mul_backward(
    x,
    gradient,
    x_gradient,
    again,
    x_stride,
    gradient_stride,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    AGAIN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < SIZE
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
    share = sigmoid(gate)
    silu = gate * share
    place = x_gradient + row * (2 * SIZE) + column
    store(place, own * up * (share + silu * (1.0 - share)), inside)
    store(place + SIZE, own * silu, inside)
    if AGAIN:
        # As the forward pass's kernel rounds it. It may take the gradient's place, which has been read.
        store(again + row * SIZE + column, gate * share * up, inside)


def silu_and_mul_backward(x: Tensor, gradient: Tensor, x_gradient: Tensor, again: Tensor | None) -> None:
    """Fills x_gradient [N, 2 I] from x [N, 2 I] and gradient [N, I], both with rows in one piece.

    again [N, I], where given, gets silu(gate) · up; it may be `gradient` itself, contiguous.
    """
    rows, size = gradient.shape
    chunk = min(triton.next_power_of_2(size), CHUNK)
    _silu_and_mul_backward[(rows, triton.cdiv(size, chunk))](
        x,
        gradient,
        x_gradient,
        again,
        x.stride(0),
        gradient.stride(0),
        SIZE=size,
        CHUNK=chunk,
        AGAIN=again is not None,
        num_warps=max(chunk // 256, 1),
    )
