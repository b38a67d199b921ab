"""Products of few e4m3 rows: which ones the Triton kernel takes from torch, and its tiles. Both follow from shapes alone.

Reading the weight is all that such a product must do. torch._scaled_mm starts 32 programs for 2,048 outputs and up to 128 rows,
on 132 multiprocessors, each of which walks all inputs; and up to 64 rows, from 3,072 outputs on, it copies the scales first.
"""

from __future__ import annotations

from typing import NamedTuple

# False: every product of e4m3 tensors is torch's. Off until `benchmarks/few_rows_mm.py` has shown a gain on a device.
ENABLED = False
FEW_ROWS = 64  # up to which the kernel takes every product
MOST_ROWS = 128  # up to which it takes those of which torch's programs leave three multiprocessors of four idle
PROCESSORS = 132  # of an H100 or H200: the programs that run at once
WALK = 2048  # inputs that one program walks, or less, where they can be cut so
SHALLOW, DEEP = 128, 256  # inputs that are loaded at a time
IN_FLIGHT = 64 * 1024  # bytes that a multiprocessor asks for ahead; its share of L2 is 49 KB a us, about 1 us away
TILES = ((64, 16), (64, 32), (64, 64), (128, 64), (64, 128), (128, 128))  # rows are whole steps of the matrix units


class Tiling(NamedTuple):
    """A program computes `rows` x `columns` results from one of `splits` parts of the inputs, `depth` at a time, with up to
    `stages` loads under way, in `warps` warps."""

    rows: int
    columns: int
    splits: int
    depth: int
    stages: int
    warps: int

    def programs(self, rows: int, outputs: int) -> int:
        return -(-rows // self.rows) * -(-outputs // self.columns) * self.splits


def takes(rows: int, outputs: int) -> bool:
    """Whether the kernel computes the product of that many rows with a weight [outputs, …], rather than torch."""
    if not ENABLED:
        return False
    torchs_programs = -(-rows // 128) * -(-outputs // 64)
    return rows <= FEW_ROWS or (rows <= MOST_ROWS and 4 * torchs_programs <= PROCESSORS)


def splits_of(inputs: int) -> int:
    """Parts into which a sum over so many inputs is cut: a power of two, of parts that are whole steps.

    It depends on nothing else, so a row's sums are the same in every batch.
    """
    splits = 1
    while inputs > WALK * splits and inputs % (2 * splits * SHALLOW) == 0:
        splits *= 2
    return splits


def tiling(rows: int, outputs: int, inputs: int) -> Tiling:
    """Of the tiles whose programs all run at once, the one that reads least a program; else the largest."""
    splits = splits_of(inputs)
    at_once = [
        (min(rows, tall) + wide, tall, wide)
        for tall, wide in TILES
        if Tiling(tall, wide, splits, 0, 0, 0).programs(rows, outputs) <= PROCESSORS
    ]
    tall, wide = min(at_once)[1:] if at_once else TILES[-1]
    depth = DEEP if tall + wide <= 96 and inputs % (splits * DEEP) == 0 else SHALLOW
    stages = 1 + -(-IN_FLIGHT // ((tall + wide) * depth))
    return Tiling(tall, wide, splits, depth, stages, warps=tall // 16)
