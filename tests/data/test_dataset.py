"""Columns found by name, times in every form, order, names and texts, digest."""

import json
import random
from datetime import datetime, timedelta, timezone
from io import StringIO

import polars as pl
import pytest
from rich.console import Console

from polyrec.core.errors import DataError
from polyrec.data.dataset import ColumnMap, load_dataset, natural_rank
from polyrec.data.times import to_microseconds

START = datetime(2011, 2, 13, 17, 45, 6)
MOMENTS = [START + timedelta(days=d, hours=5 * d, minutes=7) for d in range(40)]
MICROSECONDS = [int(m.replace(tzinfo=timezone.utc).timestamp() * 1_000_000) for m in MOMENTS]


def frame(folder, name="events.csv", **columns):
    path = folder / name
    table = pl.DataFrame(columns)
    table.write_parquet(path) if path.suffix == ".parquet" else table.write_csv(path)
    return path


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (["user", "item", "timestamp"], ["user", "item", "time"]),
        (["CustomerID", "StockCode", "InvoiceDate", "InvoiceNo"], ["user", "item", "time", "basket"]),
        (["User-ID", "parent_asin", "unixReviewTime"], ["user", "item", "time"]),
        (["session_id", "article_id", "ts"], ["user", "item", "time"]),
        (["customer_id", "article_id", "t_dat", "order_id"], ["user", "item", "time", "basket"]),
    ],
)
def test_usual_names_are_recognised(tmp_path, names, roles):
    values = {"user": ["a", "a"], "item": ["x", "y"], "time": [1, 2], "basket": ["p", "q"]}
    path = frame(tmp_path, **{name: values[role] for name, role in zip(names, roles, strict=True)}, other=[0, 0])
    found = load_dataset(path).report.columns
    assert found == dict(zip(roles, names, strict=True))


def test_named_columns_win_and_none_does_without(tmp_path):
    path = frame(tmp_path, user=["a", "a"], buyer=["b", "b"], item=["x", "y"], time=[2, 1])
    dataset = load_dataset(path, columns=ColumnMap(user="buyer", time="none"))
    assert dataset.events["user"].to_list() == ["b", "b"]
    assert dataset.events["item"].to_list() == ["x", "y"]
    assert dataset.events["time"].null_count() == 2


FORMS = {
    "iso": lambda m: m.isoformat(),
    "iso space": lambda m: m.strftime("%Y-%m-%d %H:%M:%S"),
    "iso Z": lambda m: m.isoformat() + "Z",
    "iso offset": lambda m: (m + timedelta(hours=5, minutes=30)).isoformat() + "+05:30",
    "iso negative offset": lambda m: (m - timedelta(hours=8)).strftime("%Y-%m-%d %H:%M:%S-0800"),
    "iso milliseconds": lambda m: m.isoformat() + ".000",
    "slashes": lambda m: m.strftime("%Y/%m/%d %H:%M:%S"),
    "day first": lambda m: m.strftime("%d/%m/%Y %H:%M:%S"),
    "dots": lambda m: m.strftime("%d.%m.%Y %H:%M:%S"),
    "month first": lambda m: f"{m.month}/{m.day}/{m.year} {m.hour}:{m:%M:%S}",
    "am pm": lambda m: m.strftime("%m/%d/%Y %I:%M:%S %p"),
    "month word": lambda m: m.strftime("%d %b %Y %H:%M:%S"),
    "comma": lambda m: m.strftime("%b %d, %Y %H:%M:%S"),
    "seconds": lambda m: str(micro(m) // 1_000_000),
    "float seconds": lambda m: f"{micro(m) / 1e6:.1f}",
    "scientific": lambda m: f"{micro(m) / 1e6:.9e}",
    "milliseconds": lambda m: str(micro(m) // 1_000),
    "microseconds": lambda m: str(micro(m)),
    "nanoseconds": lambda m: str(micro(m) * 1_000),
}


def micro(moment):
    return int(moment.replace(tzinfo=timezone.utc).timestamp()) * 1_000_000


@pytest.mark.parametrize("form", FORMS)
def test_times_written_in_any_form_agree(form):
    text = pl.Series([FORMS[form](m) for m in MOMENTS])
    assert to_microseconds(text, "test").to_list() == MICROSECONDS


@pytest.mark.parametrize(("unit", "factor"), [("s", 10**6), ("ms", 10**3), ("us", 1), ("ns", None)])
def test_whole_numbers_of_any_unit_agree(unit, factor):
    values = [m // factor if factor else m * 1_000 for m in MICROSECONDS]
    assert to_microseconds(pl.Series(values), unit).to_list() == MICROSECONDS
    if unit in ("s", "ms"):
        assert to_microseconds(pl.Series(values, dtype=pl.Float64), unit).to_list() == MICROSECONDS


@pytest.mark.parametrize("dtype", [pl.Datetime("ms"), pl.Datetime("us"), pl.Datetime("ns")])
def test_date_columns_agree(dtype):
    column = pl.Series(MOMENTS).cast(dtype)
    assert to_microseconds(column, "test").to_list() == MICROSECONDS
    abroad = column.dt.replace_time_zone("UTC").dt.convert_time_zone("Asia/Tokyo")
    assert to_microseconds(abroad, "test").to_list() == MICROSECONDS


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%Y%m%d", "%d/%m/%Y", "%m/%d/%Y", "%B %d, %Y", "%m %d, %Y"])
def test_days_without_a_clock(form):
    days = [datetime(m.year, m.month, m.day) for m in MOMENTS]
    text = pl.Series([d.strftime(form) for d in days])
    assert to_microseconds(text, "test").to_list() == [micro(d) for d in days]


def test_day_or_month_first_is_not_guessed():
    text = pl.Series(["03/04/2011 10:00", "05/06/2011 10:00"])
    with pytest.raises(DataError) as caught:
        to_microseconds(text, "events.csv, column 'date'")
    assert caught.value.code == "time_ambiguous"
    assert "--time-format" in caught.value.remedy
    first = to_microseconds(text, "", "%d/%m/%Y %H:%M")[0]
    assert first == micro(datetime(2011, 4, 3, 10))


def test_what_is_no_time_becomes_null():
    assert to_microseconds(pl.Series(["2011-01-01", "soon", "2011-02-30", None]), "").is_null().to_list() == [
        False, True, True, True,
    ]  # fmt: skip
    assert to_microseconds(pl.Series([1.5e9, float("nan"), float("inf")]), "").null_count() == 2


def test_events_stand_by_user_then_time_then_place_in_the_file(tmp_path):
    path = frame(tmp_path, user=["10", "9", "10", "9", "10"], item=list("abcde"), time=[5, 3, 5, 1, 4])
    events = load_dataset(path).events
    assert events.select("user", "item").rows() == [("9", "d"), ("9", "b"), ("10", "e"), ("10", "a"), ("10", "c")]


def test_baskets_stand_by_earliest_time_then_number_whatever_the_file_order(tmp_path):
    rows = [  # user, item, minute, basket; basket 10 ties with 9, basket 8 has two times
        ("u", "a", 7, "10"), ("u", "b", 7, "9"), ("u", "c", 9, "8"), ("u", "d", 6, "8"), ("v", "a", 1, "7"),
        ("v", "b", 1, "7"),
    ]  # fmt: skip
    digests = set()
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        users, items, times, baskets = zip(*rows, strict=True)
        path = frame(tmp_path, user=users, item=items, time=times, basket=baskets)
        dataset = load_dataset(path)
        assert dataset.kind == "basket"
        assert dataset.events["basket"].to_list() == ["8", "8", "9", "10", "7", "7"]
        digests.add(dataset.digest)
    assert len(digests) == 1


def test_baskets_of_one_item_are_a_sequence(tmp_path):
    path = frame(tmp_path, user=["u", "u"], item=["a", "b"], basket=["1", "2"])
    assert load_dataset(path).kind == "sequence"


def test_the_digest_sees_every_value(tmp_path):
    values = {"user": ["a", "a", "b", "b"], "item": ["x", "y", "x", "y"], "time": [1, 2, 3, 4]}
    base = load_dataset(frame(tmp_path, **values)).digest
    assert load_dataset(frame(tmp_path, "same.parquet", **values)).digest == base
    for column, other in (("user", "c"), ("item", "z"), ("time", 9)):
        changed = values | {column: [*values[column][:3], other]}
        assert load_dataset(frame(tmp_path, **changed), min_user_events=1).digest != base


def test_ids_keep_zeros_in_text_and_lose_fractions_in_floats(tmp_path):
    text = frame(tmp_path, user=["007", "007"], item=["01", "1"])
    assert load_dataset(text).items["item"].to_list() == ["1", "01"]
    floats = frame(tmp_path, "f.parquet", user=[17850.0, 17850.0], item=[1, 2])
    assert load_dataset(floats).events["user"].to_list() == ["17850"] * 2
    pandas = frame(tmp_path, user=["17850.0", "17850.0"], item=["a", "b"])
    assert load_dataset(pandas).events["user"].to_list() == ["17850"] * 2


def test_item_table_gives_order_names_and_text(tmp_path):
    events = frame(tmp_path, user=["u", "u"], item=["b", "a"])
    items = frame(
        tmp_path, "items.csv", item_id=["b", "c", "a"], title=["B  b", "", "A"], brand=["X", "", "Y"], n=[1] * 3
    )
    dataset = load_dataset(events, items)
    assert dataset.items.rows() == [("b", "B b", "B b X"), ("c", None, None), ("a", "A", "A Y")]
    assert {w.code: w.count for w in dataset.report.warnings} == {"no_time_column": 2, "cold_items": 1}
    chosen = load_dataset(events, items, ColumnMap(name="brand", text=("brand", "title")))
    assert chosen.items.rows()[0] == ("b", "X", "X B b")


def test_lists_in_item_files_become_text(tmp_path):
    events = frame(tmp_path, user=["u", "u"], item=["1", "2"])
    path = tmp_path / "items.jsonl"
    path.write_text(
        '{"item": 1, "title": "T", "categories": ["a", "b"]}\n{"item": 2, "title": null, "categories": []}\n'
    )
    assert load_dataset(events, path).items.rows() == [("1", "T", "T a b"), ("2", None, None)]


def test_natural_order_of_ids():
    assert natural_rank(pl.Series(["10", "9", "10", "100"])).to_list() == [1, 0, 1, 2]
    assert natural_rank(pl.Series(["10", "9a", "9"])).to_list() == [0, 2, 1]


def test_report_as_dictionary_and_table(tmp_path):
    path = frame(tmp_path, user=["u", "u", "[/]x", "u"], item=["a", "[red]", "b", None])
    report = load_dataset(path).report
    assert json.loads(json.dumps(report.to_dict()))["drops"][0]["code"] == "null_item"
    out = StringIO()
    Console(file=out, width=200).print(report.render())
    assert "single event" in out.getvalue()
    assert "'[/]x' in row 3" in out.getvalue()
