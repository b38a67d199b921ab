"""Products of few e4m3 rows: which ones the Triton kernel takes from torch, and its tiles. Both follow from shapes alone.

Reading the weight is all that such a product must do. torch._scaled_mm starts 32 programs for 2,048 outputs and up to 128 rows,
on 132 multiprocessors, each of which walks all inputs; and up to 64 rows, from 3,072 outputs on, it copies the scales first.
"""

from __future__ import annotations

from typing import NamedTuple

PROCESSORS = 132  # of an H100 or H200: the programs that run at once
ROWS = 64  # of a program: what one warpgroup of the matrix units has
DEPTH = 128  # inputs that are loaded at a time
COLUMNS = (16, 32, 64, 128)  # of a program
STAGES = 8  # loads under way, 192 KB at most; on an H200 within 2 % of each sweep's best, wherever the sweep kept it, but for
STAGES_OF_WIDEST = 6  # the widest tile and one tile of rows: 9.6 us instead of 10.3 for 50 rows and 12,288 outputs
WARPS = 4  # one warpgroup
WALK = 2048  # inputs that one program walks, or less, where few rows leave multiprocessors idle otherwise
SPLIT_ROWS = 128  # up to which inputs are cut; beyond it, rows make programs enough
# Up to so many rows two to three programs may share each multiprocessor, with fewer loads under way each: 13.3 us instead of
# torch's 14.2 for 256 rows and 12,288 outputs, 13.1 instead of 14.4 for 192; for 512 rows torch is faster (H200).
SHARING_ROWS = 256
SHARING_STAGES = 3


class Tiling(NamedTuple):
    """A program computes `rows` x `columns` results from one of `splits` parts of the inputs, `depth` at a time, with up to
    `stages` loads under way, in `warps` warps."""

    rows: int
    columns: int
    splits: int
    depth: int
    stages: int
    warps: int

    @property
    def bytes_under_way(self) -> int:
        """In shared memory, of rows and weight."""
        return self.stages * (self.rows + self.columns) * self.depth

    def programs(self, rows: int, outputs: int) -> int:
        return -(-rows // self.rows) * -(-outputs // self.columns) * self.splits


def takes(rows: int, outputs: int) -> bool:
    """Whether the kernel computes the product of that many rows with a weight [outputs, …], rather than torch: where the
    widest tile's programs all run at once, inputs uncut, or share multiprocessors evenly. With the 1.7B model's weights it
    takes .4 to .95 of torch's time there on an H200, and about the same or more beyond (`benchmarks/results/few_rows_mm.json`).
    """
    return _widest(1, STAGES).programs(rows, outputs) <= PROCESSORS or _shares(rows, outputs)


def splits_of(rows: int, inputs: int) -> int:
    """Parts into which a sum over so many inputs is cut: a power of two, of parts that are whole steps.

    Of rows only the side of SPLIT_ROWS counts, so a row's sums are the same in every batch on that side.
    """
    splits = 1
    while rows <= SPLIT_ROWS and inputs > WALK * splits and inputs % (2 * splits * DEPTH) == 0:
        splits *= 2
    return splits


def tiling(rows: int, outputs: int, inputs: int) -> Tiling:
    """Of the tiles whose programs all run at once, the one that reads least a program; else the widest."""
    splits = splits_of(rows, inputs)
    if _shares(rows, outputs):
        return _widest(splits, SHARING_STAGES)
    widest = _widest(splits, STAGES_OF_WIDEST if rows <= ROWS else STAGES)
    tiles = [*(widest._replace(columns=columns, stages=STAGES) for columns in COLUMNS[:-1]), widest]
    return next((tile for tile in tiles if tile.programs(rows, outputs) <= PROCESSORS), widest)


def _widest(splits: int, stages: int) -> Tiling:
    return Tiling(ROWS, COLUMNS[-1], splits, DEPTH, stages, WARPS)


def _shares(rows: int, outputs: int) -> bool:
    """Whether each multiprocessor gets two or three of the widest tile's programs."""
    programs = _widest(1, SHARING_STAGES).programs(rows, outputs)
    return rows <= SHARING_ROWS and 2 * PROCESSORS <= programs <= 3 * PROCESSORS
