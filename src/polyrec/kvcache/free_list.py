"""Which of a store's equal places nobody has: a stack of their numbers. Imports no torch."""

from __future__ import annotations

import numpy as np


class FreeList:
    """Numbers below `capacity`; none is in it at first. What was given last is taken first."""

    def __init__(self, capacity: int) -> None:
        self._numbers = np.empty(capacity, np.int32)
        self._num_free = 0

    def __len__(self) -> int:
        return self._num_free

    def take(self, num: int) -> np.ndarray:
        """int32 [num], in the order in which they were given."""
        assert 0 <= num <= self._num_free, f"{num} asked for, {self._num_free} free"
        self._num_free -= num
        return self._numbers[self._num_free : self._num_free + num].copy()

    def give(self, numbers: np.ndarray) -> None:
        """int32 [n], none of which is free."""
        end = self._num_free + len(numbers)
        self._numbers[self._num_free : end] = numbers
        self._num_free = end
