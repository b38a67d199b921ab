"""The prompts of one attention check: where a cache keeps them, and how much of each it holds beforehand.

Slots are told token by token, as `PageTable` defines them, and not through the tensors that backends use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..attention.layout import packed_layout
from ..hardware.base.attention import PackedLayout, PageTable
from ..hardware.base.backend import HardwareBackend
from ..hardware.ops.draw import Draw

PAGE_SIZE = 4
SPARE_SLOTS = 5
SPARE_PAGES = 2


@dataclass(frozen=True)
class Prompts:
    """lengths: tokens of each. cached: how many of them the cache holds beforehand; None: of none. pages: page numbers of each;
    None: packed token t lies in slot t.
    """

    lengths: tuple[int, ...]
    cached: tuple[int, ...] | None = None
    pages: tuple[tuple[int, ...], ...] | None = None

    @property
    def begun(self) -> tuple[int, ...]:
        """Tokens of each that the cache holds beforehand."""
        return self.cached or (0,) * len(self.lengths)

    @property
    def rest(self) -> tuple[int, ...]:
        """Tokens of each that are packed."""
        return tuple(length - num for length, num in zip(self.lengths, self.begun, strict=True))

    def layout(self, hardware: HardwareBackend) -> PackedLayout:
        """What a backend is given."""
        return packed_layout(torch.tensor(self.rest), to_device=hardware.runtime.to_device, table=self._table())

    def slots(self) -> list[list[int]]:
        """The slot of each token of each prompt."""
        if self.pages is None:
            starts = [sum(self.lengths[:number]) for number in range(len(self.lengths))]
            return [list(range(start, start + length)) for start, length in zip(starts, self.lengths, strict=True)]
        return [
            [pages[token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE for token in range(length)]
            for pages, length in zip(self.pages, self.lengths, strict=True)
        ]

    def num_slots(self) -> int:
        """Slots of a cache for them, some of which are nobody's."""
        if self.pages is None:
            return sum(self.lengths) + SPARE_SLOTS
        return (1 + sum(map(len, self.pages)) + SPARE_PAGES) * PAGE_SIZE

    def _table(self) -> PageTable | None:
        """Wider than any prompt needs; page 0 fills it up."""
        if self.pages is None:
            return None
        columns = max(map(len, self.pages)) + 1
        rows = [[*pages, *[0] * (columns - len(pages))] for pages in self.pages]
        cached = None if self.cached is None else torch.tensor(self.cached)
        return PageTable(torch.tensor(rows, dtype=torch.int32), PAGE_SIZE, max(self.lengths) + 1, cached)


def in_pages(lengths: Sequence[int], draw: Draw, cached: Sequence[int] | None = None) -> Prompts:
    """Prompts in pages of no order, of which none is page 0."""
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    numbers = iter((draw.distinct(sum(counts) + SPARE_PAGES, sum(counts)) + 1).tolist())
    pages = tuple(tuple(next(numbers) for _ in range(count)) for count in counts)
    return Prompts(tuple(lengths), None if cached is None else tuple(cached), pages)
