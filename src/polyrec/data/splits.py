"""Which events are learnt from, validated on and tested on: a label per event, by its basket's place or its time.

Numpy only. Sequences are baskets of one event, so «leave one out» and «last basket» are one rule but for short users.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..core.errors import DataError
from .histories import FIT, TEST, VALIDATION

Split = Literal["auto", "leave-one-out", "basket", "time"]


def label_last(baskets: np.ndarray, offsets: np.ndarray, *, fewest: int) -> np.ndarray:
    """Last basket of a user = test, the one before = validation, the rest = fit; int8 [E].

    baskets: int [E] ordinals within the user. offsets: int64 [U + 1]. Users with fewer than `fewest` baskets (at least
    2) are fit only. Of exactly two baskets the first is fit: as validation it would have no history to be asked with.
    """
    assert fewest >= 2
    sizes = np.diff(offsets)
    last = np.repeat(baskets[offsets[1:] - 1] if len(sizes) else baskets, sizes)
    labels = np.full(len(baskets), FIT, np.int8)
    labels[(baskets == last - 1) & (last >= 2)] = VALIDATION
    labels[(baskets == last) & (last + 1 >= fewest)] = TEST
    labels[last + 1 < fewest] = FIT
    return labels


def label_by_time(times: np.ndarray, validation_from: int, test_from: int) -> np.ndarray:
    """Events from `validation_from` on are validation, from `test_from` on test; int8 [E]. All in µs since 1970.

    Equal times always share a side, so no tie crosses a boundary.
    """
    if validation_from > test_from:
        raise DataError(
            "split_times",
            f"Validation starts at {validation_from} µs, after the test at {test_from} µs.",
            "Swap the two times.",
        )
    labels = np.full(len(times), FIT, np.int8)
    labels[times >= validation_from] = VALIDATION
    labels[times >= test_from] = TEST
    return labels


def time_boundaries(times: np.ndarray, quantiles: tuple[float, float]) -> tuple[int, int]:
    """The times (µs) before which the given shares of times int64 [E] lie: where validation and test start."""
    low, high = quantiles
    if not 0 < low <= high < 1:
        raise DataError("split_quantiles", f"Quantiles {quantiles} must rise and lie between 0 and 1.", "E.g. 0.8 0.9.")
    first, second = np.quantile(times, [low, high], method="higher")
    return int(first), int(second)
