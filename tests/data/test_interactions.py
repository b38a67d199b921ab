"""Histories from data sets: rows, ordinals, labels, and to disk and back."""

import numpy as np
import polars as pl
import pytest

from polyrec.core.errors import DataError
from polyrec.data.dataset import load_dataset
from polyrec.data.histories import FIT, TEST, UNUSED, VALIDATION, Histories, eval_set
from polyrec.data.interactions import load_histories, save_histories, to_histories


def random_dataset(folder, seed, baskets=True):
    rng = np.random.default_rng(seed)
    size = 400
    columns = {
        "user": rng.integers(0, 30, size),
        "item": rng.integers(0, 25, size),
        "time": rng.permutation(size) + 10**9,
    }
    if baskets:
        columns["basket"] = rng.integers(0, 6, size)
    path = folder / "events.csv"
    pl.DataFrame(columns).write_csv(path)
    return load_dataset(path)


def per_user(histories):
    """user -> list of (item row, basket, label)."""
    out = {}
    for row, user in enumerate(histories.users):
        part = slice(histories.offsets[row], histories.offsets[row + 1])
        arrays = (histories.items[part], histories.baskets[part], histories.split[part])
        out[user] = list(zip(*(array.tolist() for array in arrays), strict=True))
    return out


@pytest.mark.parametrize("baskets", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_histories_hold_the_events_in_order(tmp_path, seed, baskets):
    dataset = random_dataset(tmp_path, seed, baskets)
    order = np.random.default_rng(seed).permutation(dataset.items["item"].to_list()).tolist()
    histories = to_histories(dataset, order)
    assert histories.kind == ("basket" if baskets else "sequence")
    assert histories.num_items == len(order)
    expected, last = {}, {}
    for user, item, _, basket in dataset.events.iter_rows():
        events = expected.setdefault(user, [])
        same = baskets and last.get(user) == basket
        ordinal = 0 if not events else events[-1][1] + (not same)
        events.append((order.index(item), ordinal))
        last[user] = basket
    fewest = 2 if baskets else 3
    for user, events in per_user(histories).items():
        assert [event[:2] for event in events] == expected[user]
        final = events[-1][1]
        for _, ordinal, label in events:
            if final + 1 < fewest or ordinal < final - 1 or (ordinal == final - 1 and final < 2):
                assert label == FIT
            else:
                assert label == (TEST if ordinal == final else VALIDATION)
    assert (histories.items.dtype, histories.offsets.dtype, histories.split.dtype) == (np.int32, np.int64, np.int8)


def test_leave_one_out_ignores_baskets_when_asked(tmp_path):
    dataset = random_dataset(tmp_path, 0)
    histories = to_histories(dataset, dataset.items["item"].to_list(), "leave-one-out")
    assert histories.kind == "sequence"
    assert np.array_equal(np.sort(eval_set(histories, "test").users), np.unique(eval_set(histories, "test").users))
    assert set(np.diff(eval_set(histories, "test").target_offsets)) == {1}


def test_a_user_of_two_events_is_not_asked_by_leave_one_out(tmp_path):
    (tmp_path / "s.txt").write_text("1 5 6\n2 5 6 7\n")
    histories = to_histories(load_dataset(tmp_path / "s.txt"), ["5", "6", "7"])
    assert [[label for *_, label in events] for events in per_user(histories).values()] == [
        [FIT, FIT],
        [FIT, VALIDATION, TEST],
    ]


@pytest.mark.parametrize("baskets", [True, False])
def test_time_split_puts_every_basket_on_one_side(tmp_path, baskets):
    dataset = random_dataset(tmp_path, 1, baskets)
    first, second = (10**9 + 200) * 10**6, (10**9 + 300) * 10**6
    histories = to_histories(dataset, dataset.items["item"].to_list(), "time", boundaries=(first, second))
    key = ["user", "basket"] if baskets else ["user", "item", "time"]
    times = dataset.events.select(pl.col("time").min().over(key)).to_series()
    expected = [FIT if t < first else VALIDATION if t < second else TEST for t in times]
    assert histories.split.tolist() == expected
    assert set(expected) == {FIT, VALIDATION, TEST} if not baskets else FIT in expected
    by_quantile = to_histories(dataset, dataset.items["item"].to_list(), "time", quantiles=(0.5, 0.75))
    assert (by_quantile.split == FIT).mean() == pytest.approx(0.5, abs=0.1)


def test_impossible_splits_and_catalogs_are_refused(tmp_path):
    timeless = tmp_path / "s.txt"
    timeless.write_text("1 5 6\n2 5 6 7\n")
    dataset = load_dataset(timeless)
    for order, split, code in (
        (["5", "6", "7"], "basket", "split_no_baskets"),
        (["5", "6", "7"], "time", "split_no_time"),
        (["5", "6", "7"], "random", "split_unknown"),
        (["5", "6"], "auto", "item_not_in_catalog"),
        (["5", "6", "7", "5"], "auto", "item_twice"),
    ):
        with pytest.raises(DataError) as caught:
            to_histories(dataset, order, split)
        assert caught.value.code == code
        assert caught.value.remedy


@pytest.mark.parametrize("seed", range(3))
def test_saved_histories_come_back(tmp_path, seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 5, 20)  # users without events stay
    total = int(sizes.sum())
    histories = Histories(
        users=[f"ü{row}" for row in range(20)],
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        items=rng.integers(0, 9, total).astype(np.int32),
        baskets=rng.integers(0, 9, total).astype(np.int32),
        split=rng.choice([UNUSED, FIT, VALIDATION, TEST], total).astype(np.int8),
        num_items=9,
        kind="basket",
    )
    save_histories(tmp_path, histories)
    loaded = load_histories(tmp_path)
    assert (loaded.users, loaded.num_items, loaded.kind) == (histories.users, 9, "basket")
    for name in ("offsets", "items", "baskets", "split"):
        assert np.array_equal(getattr(loaded, name), getattr(histories, name))
        assert getattr(loaded, name).dtype == getattr(histories, name).dtype


def test_broken_prepared_files_are_refused(tmp_path):
    (tmp_path / "s.txt").write_text("1 5 6\n2 5 6 7\n")
    save_histories(tmp_path, to_histories(load_dataset(tmp_path / "s.txt"), ["5", "6", "7"]))
    parquet = (tmp_path / "interactions.parquet").read_bytes()
    for content, code in ((b"PAR1", "prepared_broken"), (None, "prepared_incomplete")):
        (tmp_path / "interactions.parquet").unlink()
        if content is not None:
            (tmp_path / "interactions.parquet").write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_histories(tmp_path)
        assert caught.value.code == code
    (tmp_path / "interactions.parquet").write_bytes(parquet)
    facts = (tmp_path / "histories.json").read_text()
    (tmp_path / "histories.json").write_text(facts.replace('"num_users": 2', '"num_users": 3'))
    with pytest.raises(DataError, match="3 users"):
        load_histories(tmp_path)
    (tmp_path / "histories.json").write_text("{}")
    with pytest.raises(DataError):
        load_histories(tmp_path)
