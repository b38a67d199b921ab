"""Each leak is planted, found with its count, and absent from clean data."""

import numpy as np
import polars as pl
import pytest

from polyrec.data.dataset import load_dataset
from polyrec.data.interactions import to_histories
from polyrec.data.leakage import check_leakage, shared_events

USERS, EACH, ITEMS = 60, 8, 150


def clean_columns(seed=0):
    rng = np.random.default_rng(seed)
    total = USERS * EACH
    return {
        "user": np.repeat(np.random.default_rng(1).permutation(USERS), EACH),
        "item": rng.integers(0, ITEMS, total),
        "time": rng.permutation(total) * 60 + 1_300_000_000,
    }


def leaks(folder, columns, **options):
    path = folder / "events.csv"
    pl.DataFrame(columns).write_csv(path)
    dataset = load_dataset(path)
    found = check_leakage(dataset, to_histories(dataset, dataset.items["item"].to_list(), **options))
    return {notice.code: notice.count for notice in found}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("split", ["leave-one-out", "time"])
def test_clean_data_has_none(tmp_path, seed, split):
    assert leaks(tmp_path, clean_columns(seed), split=split) == {}


def test_one_event_in_two_splits(tmp_path):
    """The same item at the same minute in two orders, of which the later is the test."""
    rows = [
        (user, item, 100 + user + order, order * 100 + user) for user in range(5) for order in range(3) for item in "ab"
    ]
    rows += [(0, "a", 102, 999), (1, "b", 103, 999)]  # ties with the users' last orders
    found = leaks(tmp_path, dict(zip(("user", "item", "time", "order_id"), zip(*rows, strict=True), strict=True)))
    assert found["leak_same_event"] == 2
    assert found["leak_tie_test"] == 2
    assert "leak_tie_validation" not in found


def test_shared_events_of_any_labelled_table():
    events = pl.DataFrame({"user": ["u"] * 4, "item": list("aaba"), "time": [1, 1, 1, 2], "split": [0, 2, 0, 0]})
    assert shared_events(events).count == 1
    assert shared_events(events.with_columns(split=pl.lit(0))).count == 0


@pytest.mark.parametrize(("gap", "code"), [(1, "leak_tie_test"), (2, "leak_tie_validation")])
def test_ties_across_a_boundary(tmp_path, gap, code):
    columns = clean_columns()
    order = np.lexsort((columns["time"], columns["user"]))
    columns = {name: values[order] for name, values in columns.items()}
    times = columns["time"].reshape(USERS, EACH)
    times[:7, -gap] = times[:7, -gap - 1]
    assert leaks(tmp_path, columns | {"time": times.ravel()}) == {code: 7}


def test_item_ids_given_in_the_order_of_time(tmp_path):
    columns = clean_columns()
    order = np.argsort(columns["time"])
    columns = {name: values[order] for name, values in columns.items()}
    columns["item"] = np.sort(columns["item"])
    found = leaks(tmp_path, columns)
    assert found["leak_item_id_order"] == len(set(columns["item"].tolist()))
    assert found["leak_item_id_steps"] > 0.9 * USERS * (EACH - 2)


def test_user_ids_given_in_the_order_of_time(tmp_path):
    columns = clean_columns() | {"user": np.repeat(np.arange(120), 4)}
    columns["time"] = np.arange(480) * 60 + 1_300_000_000
    assert leaks(tmp_path, columns) == {"leak_user_id_order": 120}


def test_events_of_one_day_in_id_order(tmp_path):
    columns = clean_columns()
    columns["time"] = columns["time"] // 14_400 * 14_400
    order = np.lexsort((columns["item"], columns["time"], columns["user"]))
    found = leaks(tmp_path, {name: values[order] for name, values in columns.items()})
    assert found["leak_tie_id_order"] > 100
    shuffled = leaks(tmp_path, columns)
    assert "leak_tie_id_order" not in shuffled


def test_sequences_without_times(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "s.txt"
    for rows, expected in ((np.sort(rng.integers(0, 900, (50, 6))), True), (rng.integers(0, 900, (50, 6)), False)):
        path.write_text("\n".join(" ".join(map(str, [user, *row])) for user, row in enumerate(rows)))
        dataset = load_dataset(path)
        found = check_leakage(dataset, to_histories(dataset, dataset.items["item"].to_list()))
        assert ("leak_item_id_steps" in {notice.code for notice in found}) == expected
