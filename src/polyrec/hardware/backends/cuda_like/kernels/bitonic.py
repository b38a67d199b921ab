"""Bitonic networks over int64 values that a program holds: what sorts and merges the lists of a search.

The values are a cube [2] * LOG, an axis for each bit of their number, so that a value's partner in a step is the sum along an
axis less itself: a register, a shuffle within a warp or, across warps, an exchange through shared memory behind barriers, which
takes several times as long. Hence a value's place in the flat cube is not its place in its sequence (`sequence_of`). The lowest
five bits of both are a warp's lanes. A sequence goes on in what a thread holds, 2^HELD values, and across warps last; the flat
cube goes across warps first. Where a device lays values out otherwise, this is slower, and as right.

LOG: of all values. KEEP_LOG: of a row, at least 5 where HELD is not 0. HELD: at most LOG − 5; at 0 both orders are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _axis(bit: int, log: int, held: int) -> int:
    """The axis of a cube [2] * log on which two values lie that are 2^bit apart in a sequence."""
    if bit < 5 or held == 0:
        return log - 1 - bit
    return log - 1 - (bit + log - held - 5 if bit < 5 + held else bit - held)


@triton.jit
def sequence_of(place, LOG: tl.constexpr, HELD: tl.constexpr):
    """Where in its sequence the value stands that is at a place of the flat cube."""
    held, warp = place >> (LOG - HELD), (place & ((1 << (LOG - HELD)) - 1)) >> 5
    return (place & 31) | (held << 5) | (warp << (5 + HELD))


@triton.jit
def cube_of(LOG: tl.constexpr, HELD: tl.constexpr):
    return tl.reshape(sequence_of(tl.arange(0, 1 << LOG), LOG, HELD), [2] * LOG)


@triton.jit
def _bit(BIT: tl.constexpr, LOG: tl.constexpr, HELD: tl.constexpr):
    """That bit of where a value stands in its sequence, along its axis."""
    AXIS: tl.constexpr = _axis(BIT, LOG, HELD)
    return tl.reshape(tl.arange(0, 2), [1] * AXIS + [2] + [1] * (LOG - 1 - AXIS))


@triton.jit
def _exchange(values, falling, BIT: tl.constexpr, LOG: tl.constexpr, HELD: tl.constexpr):
    """One step of a bitonic network: of two values 2^BIT apart, the larger goes first where falling."""
    other = tl.sum(values, _axis(BIT, LOG, HELD), keep_dims=True) - values
    wants_larger = (_bit(BIT, LOG, HELD) == 0) == falling
    return tl.where((other > values) == wants_larger, other, values)


@triton.jit
def merge_rows(values, falling, KEEP_LOG: tl.constexpr, LOG: tl.constexpr, HELD: tl.constexpr):
    """Sorts rows of 2^KEEP_LOG values that change direction once."""
    for step in tl.static_range(KEEP_LOG):
        values = _exchange(values, falling, KEEP_LOG - 1 - step, LOG, HELD)
    return values


@triton.jit
def sort_rows(values, sequence, KEEP_LOG: tl.constexpr, LOG: tl.constexpr, HELD: tl.constexpr):
    """Sorts rows of 2^KEEP_LOG values: even rows fall, odd ones rise. The loop over sizes runs on the device: written out, as
    `tl.sort` does, it takes many times as long to compile."""
    for size in range(KEEP_LOG):
        falling = (sequence & (2 << size)) == 0
        for step in tl.static_range(KEEP_LOG):
            if step >= KEEP_LOG - 1 - size:
                values = _exchange(values, falling, KEEP_LOG - 1 - step, LOG, HELD)
    return values


@triton.jit
def _half(
    values, num_rows, odd, GONE: tl.constexpr, KEEP_LOG: tl.constexpr, LOG: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """One round of a tournament: of rows 2 i and 2 i + 1 the best 2^KEEP_LOG, as row i, after GONE rounds."""
    FEW: tl.constexpr = KEEP_LOG >= 5 + HELD  # a thread holds nothing of a second row
    NOW: tl.constexpr = HELD if FEW else (HELD - GONE if KEEP_LOG + GONE <= 5 + HELD else KEEP_LOG - 5)
    NEXT: tl.constexpr = HELD if FEW else (HELD - GONE - 1 if KEEP_LOG + GONE + 1 <= 5 + HELD else KEEP_LOG - 5)
    # One row falls, the other rises: the larger of each pair are the best of both and change direction once.
    values = tl.max(values, _axis(KEEP_LOG, LOG - GONE, NOW))
    if (num_rows > (1 << GONE)) | (odd != 0):
        if LOG - GONE - 1 > KEEP_LOG:
            values = merge_rows(values, _bit(KEEP_LOG, LOG - GONE - 1, NEXT) == 0, KEEP_LOG, LOG - GONE - 1, NEXT)
        else:
            values = merge_rows(values, odd == 0, KEEP_LOG, KEEP_LOG, NEXT)
    return values


@triton.jit
def best_row(values, num_rows, odd, KEEP_LOG: tl.constexpr, LOG: tl.constexpr, HELD: tl.constexpr):
    """Of sorted rows, of which the first num_rows hold something, the best 2^KEEP_LOG: falling, or rising where odd."""
    for gone in tl.static_range(LOG - KEEP_LOG):
        values = _half(values, num_rows, odd, gone, KEEP_LOG, LOG, HELD)
    return values
