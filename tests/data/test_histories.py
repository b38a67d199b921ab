"""Evaluation sets against a plain loop over users."""

import numpy as np
import pytest

from polyrec.data.histories import FIT, TEST, UNUSED, VALIDATION, Histories, eval_set, known_before, select_events


def random_histories(seed, users=40, items=9):
    """Random users, some without events; labels in any mixture that keeps the order of time."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 9, users)
    total = sizes.sum()
    baskets = [np.sort(rng.integers(0, 4, size)) for size in sizes]
    split = [np.sort(rng.choice([UNUSED, FIT, FIT, VALIDATION, TEST], size)) for size in sizes]
    return Histories(
        users=[f"u{row}" for row in range(users)],
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        items=rng.integers(0, items, total).astype(np.int32),
        baskets=np.concatenate(baskets).astype(np.int32),
        split=np.concatenate(split).astype(np.int8),
        num_items=items,
        kind="basket",
    )


def plain_eval(histories, stage, only_new):
    label = VALIDATION if stage == "validation" else TEST
    rows = []
    for user in range(histories.num_users):
        span = range(histories.offsets[user], histories.offsets[user + 1])
        past = [e for e in span if histories.split[e] in (FIT, VALIDATION) and histories.split[e] < label]
        targets = {int(histories.items[e]) for e in span if histories.split[e] == label}
        if only_new:
            targets -= {int(histories.items[e]) for e in past}
        if past and targets:
            items, baskets = histories.items[past].tolist(), histories.baskets[past].tolist()
            rows.append((user, items, baskets, sorted(targets)))
    return rows


@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.parametrize("stage", ["validation", "test"])
@pytest.mark.parametrize("seed", range(5))
def test_eval_set_equals_a_plain_loop(seed, stage, only_new):
    histories = random_histories(seed)
    asked = eval_set(histories, stage, only_new=only_new)
    got = []
    for row in range(len(asked)):
        items, baskets = asked.history(row)
        got.append((int(asked.users[row]), items.tolist(), baskets.tolist(), asked.target(row).tolist()))
    assert got == plain_eval(histories, stage, only_new)
    assert asked.items.dtype == asked.targets.dtype == asked.baskets.dtype == np.int32
    assert asked.users.dtype == asked.offsets.dtype == asked.target_offsets.dtype == np.int64


def test_eval_set_of_nobody():
    histories = random_histories(0)
    nobody = eval_set(select_events(histories, np.zeros(len(histories.items), bool)), "test")
    assert len(nobody) == 0
    assert nobody.offsets.tolist() == nobody.target_offsets.tolist() == [0]


@pytest.mark.parametrize("stage", ["validation", "test"])
def test_known_before_keeps_users_and_only_the_past(stage):
    histories = random_histories(3)
    known = known_before(histories, stage)
    allowed = {FIT} if stage == "validation" else {FIT, VALIDATION}
    assert known.users == histories.users
    for user in range(histories.num_users):
        span = slice(histories.offsets[user], histories.offsets[user + 1])
        keep = np.isin(histories.split[span], list(allowed))
        kept = slice(known.offsets[user], known.offsets[user + 1])
        assert known.items[kept].tolist() == histories.items[span][keep].tolist()
        assert known.split[kept].tolist() == histories.split[span][keep].tolist()
