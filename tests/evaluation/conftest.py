"""Fixtures of the evaluation tests: small random histories."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from polyrec.data.histories import FIT, TEST, VALIDATION, Histories


def random_histories(seed: int, kind: str, num_users: int = 25, num_items: int = 12) -> Histories:
    """Users with 1 to 6 baskets; baskets of 1 to 4 distinct items (of one, for sequences); last two are held out."""
    rng = np.random.default_rng(seed)
    items, baskets, split, offsets = [], [], [], [0]
    for _ in range(num_users):
        count = int(rng.integers(1, 7 if kind == "basket" else 14))
        for ordinal in range(count):
            size = int(rng.integers(1, 5)) if kind == "basket" else 1
            items += rng.choice(num_items, size, replace=False).tolist()
            baskets += [ordinal] * size
            label = TEST if ordinal == count - 1 else VALIDATION if ordinal == count - 2 else FIT
            split += [label if count >= 2 else FIT] * size
        offsets.append(len(items))
    return Histories(
        users=[str(user) for user in range(num_users)],
        offsets=np.array(offsets, np.int64),
        items=np.array(items, np.int32),
        baskets=np.array(baskets, np.int32),
        split=np.array(split, np.int8),
        num_items=num_items,
        kind=kind,
    )


@pytest.fixture
def make_histories() -> Callable[..., Histories]:
    """random_histories(seed, kind, num_users, num_items)."""
    return random_histories
