"""top_k against sorting; taking users against reading them one by one."""

from __future__ import annotations

import numpy as np

from polyrec.data.histories import eval_set
from polyrec.evaluation.ranking import steps_back, take_users, top_k, user_blocks


def test_top_k_with_ties_and_empty_places():
    rng = np.random.default_rng(0)
    for k in (1, 4, 9, 12):
        scores = rng.integers(-2, 3, (40, 9)).astype(np.float64)
        ranked = top_k(scores, k, floor=0.0)
        for row, found in zip(scores, ranked, strict=True):
            order = [item for item in np.argsort(-row, kind="stable").tolist() if row[item] > 0][:k]
            assert found.tolist() == order + [-1] * (k - len(order))


def test_take_users_and_blocks(make_histories):
    asked = eval_set(make_histories(1, "basket"), "test")
    rows = np.array([5, 0, 3])
    taken = take_users(asked, rows)
    for place, row in enumerate(rows):
        assert taken.users[place] == asked.users[row]
        np.testing.assert_array_equal(taken.history(place), asked.history(row))
        np.testing.assert_array_equal(taken.target(place), asked.target(row))
    blocks = list(user_blocks(asked, 4))
    assert max(map(len, blocks)) == 4
    np.testing.assert_array_equal(np.concatenate([block.items for block in blocks]), asked.items)
    np.testing.assert_array_equal(np.concatenate([block.targets for block in blocks]), asked.targets)


def test_steps_back():
    assert steps_back(np.array([0, 3, 3, 5])).tolist() == [2, 1, 0, 1, 0]
