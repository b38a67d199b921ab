"""The bundled data: the published counts, the order of baskets, the names, the licence beside it."""

from importlib.resources import files

import numpy as np
import polars as pl
import pytest

from polyrec.data.dataset import load_online_retail
from polyrec.data.datasets.online_retail import raw_online_retail
from polyrec.data.histories import FIT, TEST, VALIDATION, eval_set
from polyrec.data.interactions import to_histories
from polyrec.data.leakage import check_leakage


@pytest.fixture(scope="module")
def dataset():
    return load_online_retail()


@pytest.fixture(scope="module")
def histories(dataset):
    return to_histories(dataset, dataset.items["item"].to_list())


def test_counts_of_the_cleaned_data(dataset):
    cleaned = {drop.code: drop.count for drop in dataset.report.cleaning}
    before_merging = dataset.report.rows_read - sum(n for code, n in cleaned.items() if code != "merged")
    assert dataset.report.rows_read == 541_909
    assert cleaned["no_customer"] == 135_080
    assert before_merging == 396_337
    assert dataset.events.height == dataset.report.num_events == 386_326
    assert dataset.report.num_users == 4_334
    assert dataset.report.num_items == dataset.events["item"].n_unique() == 3_659
    assert dataset.report.num_baskets == 18_402
    assert dataset.kind == "basket"
    assert dataset.report.drops == ()
    assert {w.code: w.count for w in dataset.report.warnings} == {"basket_times": 30}
    assert dataset.events.group_by("basket").len()["len"].median() == 15


def test_counts_of_the_split(histories):
    baskets = np.maximum.reduceat(histories.baskets, histories.offsets[:-1]) + 1
    assert (baskets >= 2).sum() == 2_829
    assert (baskets >= 3).sum() == 1_998
    assert len(eval_set(histories, "test")) == 2_829
    assert len(eval_set(histories, "test", only_new=True)) == 2_498
    assert len(eval_set(histories, "validation")) == 1_998
    everything, new = eval_set(histories, "test"), eval_set(histories, "test", only_new=True)
    assert 1 - len(new.targets) / len(everything.targets) == pytest.approx(0.34, abs=0.005)  # repeats


def test_labels_against_a_plain_reading_of_the_raw_lines(histories):
    """Dictionaries and loops over the published lines, by the words of the protocol."""
    lines = raw_online_retail().filter(pl.col("CustomerID").is_not_null() & (pl.col("UnitPrice") > 0))
    invoices: dict[int, dict[str, tuple]] = {}
    for customer, invoice, code, when in lines.select(
        "CustomerID", "InvoiceNo", "StockCode", "InvoiceDate"
    ).iter_rows():
        if invoice[0] != "C" and code not in {"POST", "M", "C2", "DOT", "PADS", "BANK CHARGES"}:
            first, codes = invoices.setdefault(int(customer), {}).get(invoice, (when, set()))
            invoices[int(customer)][invoice] = (min(first, when), codes | {code})
    expected = {}
    for customer, bought in invoices.items():
        ordered = [bought[number][1] for number in sorted(bought, key=lambda n: (bought[n][0], int(n)))]
        labels = [FIT] * len(ordered)
        if len(ordered) >= 2:
            labels[-1] = TEST
        if len(ordered) >= 3:
            labels[-2] = VALIDATION
        expected[str(customer)] = [(label, len(codes)) for label, codes in zip(labels, ordered, strict=True)]
    assert set(expected) == set(histories.users)
    for row, user in enumerate(histories.users):
        part = slice(histories.offsets[row], histories.offsets[row + 1])
        ordinals, starts, sizes = np.unique(histories.baskets[part], return_index=True, return_counts=True)
        assert ordinals.tolist() == list(range(len(ordinals)))
        assert list(zip(histories.split[part][starts].tolist(), sizes.tolist(), strict=True)) == expected[user]


def test_item_names_are_the_most_frequent_descriptions(dataset):
    names = dict(dataset.items.select("item", "name").iter_rows())
    assert names["85123A"] == "WHITE HANGING HEART T-LIGHT HOLDER"
    assert all(names.values())
    raw = raw_online_retail().filter(pl.col("StockCode") == "22423", pl.col("CustomerID").is_not_null())
    assert names["22423"] == raw["Description"].str.strip_chars().mode()[0]


def test_strict_passes_and_the_digest_repeats(dataset):
    again = load_online_retail(strict=True)
    assert again.digest == dataset.digest
    assert again.events.equals(dataset.events)
    assert again.items.equals(dataset.items)


def test_known_ties_are_reported(dataset, histories):
    found = {notice.code: notice.count for notice in check_leakage(dataset, histories)}
    assert set(found) == {"leak_same_event", "leak_tie_validation", "leak_tie_test"}
    assert 0 < found["leak_tie_test"] <= 122  # 122 pairs of one customer's invoices share their minute


def test_the_file_is_small_and_attributed():
    folder = files("polyrec.data.datasets")
    assert len((folder / "online_retail.parquet").read_bytes()) <= 3_000_000
    licence = (folder / "online_retail.LICENSE.txt").read_text()
    for word in ("Chen", "Sain", "Guo", "2012", "CC0", "CC BY 4.0"):
        assert word in licence
