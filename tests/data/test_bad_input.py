"""A user's mistakes: a clear DataError, or a counted drop that `strict` turns into an error. Never another exception."""

import gzip
import itertools
import json
import random

import polars as pl
import pytest

from polyrec.core.errors import DataError, PolyrecError
from polyrec.data.dataset import ColumnMap, load_dataset

GOOD = ["user,item,time", "u,a,2011-01-01", "u,b,2011-01-02", "v,a,2011-01-03", "v,c,2011-01-04"]


def events(folder, *extra, header=None, name="events.csv"):
    path = folder / name
    path.write_text("\n".join([header or GOOD[0], *GOOD[1:], *extra]) + "\n", encoding="utf-8")
    return path


DROPS = {  # extra rows -> code, count, row of the first
    "null user": ([",a,2011-01-05", " ,b,2011-01-05"], "null_user", 2, 5),
    "null item": (["u,,2011-01-05"], "null_item", 1, 5),
    "null time": (["u,c,", "u,c,2011-01-05"], "null_time", 1, 5),
    "unparsable time": (["u,c,2011-01-05", "u,d,yesterday", "v,d,2011-02-30"], "unparsable_time", 2, 6),
    "duplicate rows": (["u,a,2011-01-01", "u,a,2011-01-01"], "duplicate", 2, 5),
    "same time in another form": (["u,a,2011-01-01 00:00"], "duplicate", 1, 5),
    "user with one event": (["w,a,2011-01-01"], "short_user", 1, 5),
    "user with one event twice": (["w,a,2011-01-01", "w,a,2011-01-01"], "short_user", 1, 5),
    "short line": (["u"], "null_item", 1, 5),
}


@pytest.mark.parametrize("case", DROPS)
def test_faulty_rows_are_dropped_counted_and_refused_by_strict(tmp_path, case):
    extra, code, count, row = DROPS[case]
    path = events(tmp_path, *extra)
    report = load_dataset(path).report
    drop = next(drop for drop in report.drops if drop.code == code)
    assert (drop.count, drop.row) == (count, row)
    assert report.rows_read == report.num_events + report.rows_dropped
    with pytest.raises(DataError) as caught:
        load_dataset(path, strict=True)
    assert caught.value.code == "strict_data"
    assert f"{count} × {drop.reason}" in caught.value.message


def test_good_rows_pass_strict(tmp_path):
    report = load_dataset(events(tmp_path), strict=True).report
    assert report.drops == ()
    assert report.num_events == 4


def test_unparsable_time_names_value_and_row(tmp_path):
    drop = load_dataset(events(tmp_path, "u,d,yesterday")).report.drops[0]
    assert (drop.example, drop.row) == ("yesterday", 5)


def test_items_missing_in_the_table_are_dropped_with_their_name(tmp_path):
    (tmp_path / "items.csv").write_text("item,title\na,A\nb,B\na,again\n,nobody\n")
    dataset = load_dataset(events(tmp_path), tmp_path / "items.csv")
    drops = {drop.code: (drop.count, drop.example) for drop in dataset.report.drops}
    assert drops == {
        "null_item_id": (1, None),
        "duplicate_item": (1, "a"),
        "unknown_item": (1, "c"),
        "short_user": (1, "v"),  # what is left of v
    }
    assert dataset.items["name"].to_list() == ["A", "B"]
    with pytest.raises(DataError, match="item not in items"):
        load_dataset(events(tmp_path), tmp_path / "items.csv", strict=True)


def test_a_repeated_item_in_a_basket_keeps_the_earliest(tmp_path):
    path = tmp_path / "events.csv"
    path.write_text("user,item,time,order_id\nu,a,2011-01-02,1\nu,a,2011-01-01,1\nu,b,2011-01-03,1\nu,c,2011-01-03,\n")
    dataset = load_dataset(path)
    assert {drop.code: drop.count for drop in dataset.report.drops} == {"null_basket": 1, "duplicate": 1}
    assert dataset.report.drops[1].row == 1
    assert {w.code: w.count for w in dataset.report.warnings} == {"basket_times": 1}


ERRORS = {
    "no user": ("usr,item,time", {}, "column_missing", ["'usr'", "--user-column"]),
    "no item": ("user,thing_itm,time", {}, "column_missing", ["'thing_itm'", "--item-column"]),
    "named column absent": (None, {"columns": ColumnMap(user="users")}, "column_missing", ["'user'", "--user-column"]),
    "named time absent": (None, {"columns": ColumnMap(time="tame")}, "column_missing", ["'time'", "--time-column"]),
    "named basket absent": (None, {"columns": ColumnMap(basket="b")}, "column_missing", ["--basket-column"]),
    "two users": ("user,user_id,time", {}, "column_ambiguous", ["'user' or 'user_id'", "--user-column"]),
    "no user allowed": (None, {"columns": ColumnMap(user="none")}, "column_missing", ["--user-column"]),
    "wrong time column": (
        None,
        {"columns": ColumnMap(time="item")},
        "time_unparsable",
        ["'a'", "row 1", "--time-column"],
    ),
    "format that fits nothing": (None, {"time_format": "%d.%m.%Y"}, "time_unparsable", ["--time-format"]),
    "format of hours only": (None, {"time_format": "%H"}, "time_format", ["'%H'"]),
    "wrong reader": (None, {"format": "parquet"}, "file_broken", ["Parquet"]),
    "jsonl reader": (None, {"format": "jsonl"}, "file_broken", []),
    "recbole reader": (None, {"format": "recbole"}, "recbole_header", ["user_id:token"]),
    "everybody too short": (None, {"min_user_events": 9}, "no_events", ["fewer than 9"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_mistakes_name_the_remedy(tmp_path, case):
    header, arguments, code, words = ERRORS[case]
    with pytest.raises(DataError) as caught:
        load_dataset(events(tmp_path, header=header), **arguments)
    assert caught.value.code == code
    for word in words:
        assert word in str(caught.value)


def test_a_header_without_rows(tmp_path):
    for suffix, text in (("csv", "user,item\n"), ("inter", "user_id:token\titem_id:token\n")):
        path = tmp_path / f"e.{suffix}"
        path.write_text(text)
        with pytest.raises(DataError) as caught:
            load_dataset(path)
        assert caught.value.code == "file_empty"
    pl.DataFrame(schema={"user": pl.Int64, "item": pl.Int64}).write_parquet(tmp_path / "e.parquet")
    with pytest.raises(DataError) as caught:
        load_dataset(tmp_path / "e.parquet")
    assert caught.value.code == "file_empty"


def test_ids_that_are_no_ids(tmp_path):
    pl.DataFrame({"user": [["u"], ["v"]], "item": [1, 2]}).write_parquet(tmp_path / "e.parquet")
    with pytest.raises(DataError) as caught:
        load_dataset(tmp_path / "e.parquet")
    assert caught.value.code == "id_nested"


def test_times_of_no_use_in_a_parquet_file(tmp_path):
    for times in ([[1], [2]], [True, False], [float("nan")] * 2, [b"a", b"b"], [{"a": 1}] * 2):
        pl.DataFrame({"user": ["u", "u"], "item": [1, 2], "time": times}).write_parquet(tmp_path / "e.parquet")
        with pytest.raises(DataError):
            load_dataset(tmp_path / "e.parquet")


def test_sequence_lines_without_items_are_counted(tmp_path):
    path = tmp_path / "sequences.txt"
    path.write_text("1 5 6\n2\n3 7 5\n4 5\n")
    report = load_dataset(path).report
    assert {drop.code: drop.count for drop in report.drops} == {"null_item": 1, "short_user": 1}


def test_json_of_mixed_ids(tmp_path):
    path = tmp_path / "e.jsonl"
    rows = [{"user": 1, "item": "a"}, {"user": "x", "item": 2}, {"user": 1, "item": "b"}, {"user": "x", "item": 3.5}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert load_dataset(path).events.select("user", "item").rows() == [("1", "a"), ("1", "b"), ("x", "2"), ("x", "3.5")]


@pytest.mark.parametrize("name", ["e.csv", "e.tsv", "e.jsonl", "e.inter", "e.txt", "e.parquet", "e.csv.gz"])
def test_no_damage_escapes_as_another_exception(tmp_path, name):
    """Valid files with random bytes changed, cut or doubled: loaded, or a PolyrecError."""
    good = events(tmp_path)
    source = tmp_path / name
    table = pl.read_csv(good)
    if name == "e.parquet":
        table.write_parquet(source)
        content = source.read_bytes()
    elif name == "e.jsonl":
        content = "\n".join(json.dumps(row) for row in table.to_dicts()).encode()
    elif name == "e.inter":
        content = (
            "user:token\titem:token\ttime:token\n" + table.write_csv(separator="\t", include_header=False)
        ).encode()
    else:
        content = table.write_csv(separator="\t" if name == "e.tsv" else " " if name == "e.txt" else ",").encode()
    if name == "e.csv.gz":
        content = gzip.compress(content, mtime=0)
    rng = random.Random(0)
    outcomes = set()
    for way in itertools.islice(itertools.cycle(["cut", "swap", "double"]), 60):
        at, size = rng.randrange(len(content)), rng.randrange(1, 9)
        middle = {"cut": b"", "swap": rng.randbytes(size), "double": content[at : at + size] * 2}[way]
        source.write_bytes(content[:at] + middle + content[at + size :])
        try:
            load_dataset(source)
            outcomes.add("loaded")
        except PolyrecError:
            outcomes.add("refused")
    assert "refused" in outcomes
