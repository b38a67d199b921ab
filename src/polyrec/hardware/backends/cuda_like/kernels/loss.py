"""Cross-entropy of rows of logits, its gradient written over them, and what a sum's gradient does to ready ones."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 8192  # logits that a program holds at a time
PROGRAMS, BLOCK = 1024, 4096  # of a product with one number
LOWEST = tl.constexpr(-3.4e38)  # where a lane's maximum begins: −∞ less −∞ would be no number


@triton.jit
def _cross_entropy(logits, targets, scale, losses, stride, classes, CHUNK: tl.constexpr, GRADIENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lane = tl.arange(0, CHUNK)
    target = tl.load(targets + row)
    # Each lane keeps the maximum and the sum of its own columns; they meet once, behind the loop.
    largest = tl.full([CHUNK], LOWEST, tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    for begin in range(0, classes, CHUNK):
        value = tl.load(logits + begin + lane, mask=begin + lane < classes, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, value)
        total = total * tl.exp(largest - higher) + tl.exp(value - higher)
        largest = higher
    top = tl.max(largest, 0)
    normalizer = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(losses + row, normalizer - tl.load(logits + target).to(tl.float32))
    if GRADIENT:
        own = tl.load(scale + row)
        tl.debug_barrier()  # the target's logit is read before its place is written
        last = (classes - 1) // CHUNK * CHUNK
        for begin in range(0, classes, CHUNK):
            column = last - begin + lane  # from the end, which was read last and may still be in a cache
            inside = column < classes
            share = tl.exp(tl.load(logits + column, mask=inside, other=0.0).to(tl.float32) - normalizer)
            gradient = tl.where(column == target, share - 1.0, share) * own
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside)


def cross_entropy(logits: Tensor, targets: Tensor, scale: Tensor | None, losses: Tensor) -> None:
    """Fills losses fp32 [N] from logits [N, C] and targets int64 [N].

    scale: fp32 [N]; then (softmax − one-hot) · scale takes the place of the logits. Sums are in fp32.
    """
    rows, classes = logits.shape
    if rows == 0:
        return
    chunk = min(triton.next_power_of_2(classes), CHUNK)
    _cross_entropy[(rows,)](
        logits,
        targets,
        scale,
        losses,
        logits.stride(0),
        classes,
        CHUNK=chunk,
        GRADIENT=scale is not None,
        num_warps=min(max(chunk // 512, 1), 16),
    )


@triton.jit(do_not_specialize=["steps"])
def _scale(values, factor, size, steps, BLOCK: tl.constexpr):
    own = tl.load(factor).to(tl.float32)
    if own != 1.0:
        for step in range(steps):
            at = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(values + at, mask=at < size, other=0.0).to(tl.float32) * own
            tl.store(values + at, value.to(values.dtype.element_ty), mask=at < size)


def scale(values: Tensor, factor: Tensor) -> None:
    """values · factor, one number on the same device, in the values' place. Where it is one, no value is touched."""
    size = values.numel()
    programs = min(triton.cdiv(size, BLOCK), PROGRAMS)
    if programs:
        _scale[(programs,)](values, factor, size, triton.cdiv(size, programs * BLOCK), BLOCK=BLOCK, num_warps=8)
