"""Files of users in, files of recommendations out: every format gives what the recommender gives user by user."""

from __future__ import annotations

import csv
import gzip
import json

import polars as pl
import pytest

from polyrec.core.errors import DataError, PolyrecError, RequestError
from polyrec.core.request import RecommendRequest
from polyrec.data.columns import ColumnMap
from polyrec.engine.files import SCHEMA, output_format, recommend_file
from polyrec.engine.history_files import open_histories, parse_baskets, read_item_ids
from polyrec.engine.recommender import Recommender
from polyrec.testing.tiny import write_tiny_model

HISTORIES = {
    "ann": [["item-1", "item-2"], ["item-3"]],
    "bob": [["item-4"]],
    "7": [["item-5", "stranger"], ["item-6", "item-7"], ["item-8"]],
    "cold": [["nobody", "stranger"]],
}


@pytest.fixture(scope="module")
def recommender(tmp_path_factory):
    return Recommender.from_pretrained(write_tiny_model(tmp_path_factory.mktemp("files") / "tiny", num_items=50))


def read(path):
    """Any output as rows of text and numbers."""
    if path.suffix == ".parquet":
        return pl.read_parquet(path).rows()
    if path.suffix == ".jsonl":
        return [tuple(json.loads(line).values()) for line in path.read_text(encoding="utf-8").splitlines()]
    with open(path, newline="", encoding="utf-8") as stream:
        rows = list(csv.reader(stream, delimiter="\t" if path.suffix == ".tsv" else ","))
    assert rows[0] == list(SCHEMA)
    return [(user, int(rank), item, float(score), *rest) for user, rank, item, score, *rest in rows[1:]]


def expected(recommender, histories, **options):
    rows = []
    for user, history in histories.items():
        answer = recommender.recommend(history, **options)
        for rank, item in enumerate(answer.items, 1):
            rows.append((user, rank, item.item_id, item.score, item.sid, item.name, answer.source))
    return rows


def same(found, wanted):
    assert [(*row[:3], *row[4:]) for row in found] == [(*row[:3], *row[4:]) for row in wanted]
    assert [row[3] for row in found] == pytest.approx([row[3] for row in wanted], abs=1e-4)


def events(histories=HISTORIES):
    """Rows user, order, item, day of shuffled orders; the day alone tells their order."""
    rows = []
    for user, baskets in histories.items():
        for day, basket in enumerate(baskets, 1):
            rows += [(user, f"{user}-{9 - day}", item, f"2024-05-{day:02d}") for item in basket]
    return pl.DataFrame(rows, schema=["customer", "order", "sku", "day"], orient="row").sample(
        fraction=1, shuffle=True, seed=1
    )


def write(path, kind):
    """One of the input forms; returns the columns that must be named."""
    lists = [{"user_id": user, "history": history} for user, history in HISTORIES.items()]
    if kind == "events":
        table = events()
        {".csv": table.write_csv, ".parquet": table.write_parquet, ".jsonl": table.write_ndjson}[path.suffix](path)
        return ColumnMap(basket="order")
    if path.suffix == ".parquet":
        pl.DataFrame(lists).write_parquet(path)
    elif path.suffix == ".csv":
        rows = [(row["user_id"], ";".join(",".join(basket) for basket in row["history"])) for row in lists]
        pl.DataFrame(rows, schema=["user_id", "history"], orient="row").write_csv(path)
    else:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "wt", encoding="utf-8") as stream:
            stream.write("\n" + "\n".join(json.dumps(row) for row in lists))
    return ColumnMap()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("events", "e.csv"),
        ("events", "e.parquet"),
        ("events", "e.jsonl"),
        ("lists", "l.parquet"),
        ("lists", "l.csv"),
        ("lists", "l.jsonl"),
        ("lists", "l.jsonl.gz"),
    ],
)
def test_every_input_form_gives_the_same_histories(tmp_path, kind, name):
    columns = write(tmp_path / name, kind)
    source = open_histories(tmp_path / name, columns)
    assert source.num_users == len(HISTORIES)
    assert (source.report is None) == (kind == "lists")

    def baskets(history):
        return [sorted([entry] if isinstance(entry, str) else entry) for entry in history]

    assert {user.user: baskets(user.history) for user in source.users} == HISTORIES


@pytest.mark.parametrize("window", [1, 3, 100])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_output_form_holds_the_recommender_s_answers(recommender, tmp_path, suffix, window):
    write(tmp_path / "in.jsonl", "lists")
    out = tmp_path / "new" / f"out{suffix}"
    done = []
    template = RecommendRequest(history=(), n=4, exclude_seen=True, exclude=["item-9"])
    summary = recommend_file(
        recommender, open_histories(tmp_path / "in.jsonl"), out, template, window=window, on_progress=done.append
    )
    same(read(out), expected(recommender, HISTORIES, n=4, exclude_seen=True, exclude=["item-9"]))
    assert done == {1: [1, 1, 1, 1], 3: [3, 1], 100: [4]}[window]
    assert summary.to_dict() == {
        "users": 4,
        "rows": 16,
        "popularity": 1,
        "empty": 0,
        "history_entries": 11,
        "unknown_entries": 3,
        "unknown_items": 2,
        "unknown_examples": {"stranger": 2, "nobody": 1},
    }
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_parquet_keeps_types_and_window_order(recommender, tmp_path):
    histories = {f"u{number}": [["item-1"]] for number in range(40)}
    lines = [json.dumps({"user": user, "history": history}) for user, history in histories.items()]
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    recommend_file(
        recommender,
        open_histories(tmp_path / "in.jsonl"),
        tmp_path / "out.parquet",
        RecommendRequest(history=(), n=2),
        window=3,
    )
    table = pl.read_parquet(tmp_path / "out.parquet")
    assert dict(table.schema) == SCHEMA
    assert table["user"].to_list() == [user for user in histories for _ in range(2)]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_nobody_gets_anything(recommender, tmp_path, suffix):
    write(tmp_path / "in.jsonl", "lists")
    out = tmp_path / f"out{suffix}"
    template = RecommendRequest(history=(), allow=["item-1"], exclude=["item-1"])
    summary = recommend_file(recommender, open_histories(tmp_path / "in.jsonl"), out, template)
    assert (summary.users, summary.rows, summary.empty) == (4, 0, 4)
    assert read(out) == []


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_an_error_names_the_user_and_leaves_the_old_file(recommender, tmp_path, suffix):
    write(tmp_path / "in.jsonl", "lists")
    out = tmp_path / f"out{suffix}"
    out.write_text("old")
    template = RecommendRequest(history=(), unknown="error")
    with pytest.raises(RequestError, match=r"User '7': .* 'stranger'") as caught:
        recommend_file(recommender, open_histories(tmp_path / "in.jsonl"), out, template, window=1)
    assert caught.value.code == "unknown_items"
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", out.name]


def test_faulty_options_name_no_user(recommender, tmp_path):
    write(tmp_path / "in.jsonl", "lists")
    source = open_histories(tmp_path / "in.jsonl")
    with pytest.raises(RequestError, match=r"^n is 0"):
        recommend_file(recommender, source, tmp_path / "out.csv", RecommendRequest(history=(), n=0))
    assert not (tmp_path / "out.csv").exists()


def test_events_are_cleaned_as_prepare_does(tmp_path):
    path = tmp_path / "events.csv"
    path.write_text(
        "user,item,time\nu1,b,2024-01-02\nu1,a,2024-01-01\nu1,a,2024-01-01\nu2,c,2024-01-03\n,d,2024-01-01\nu2,e,soon\n",
        encoding="utf-8",
    )
    source = open_histories(path)
    assert {user.user: user.history for user in source.users} == {"u1": ["a", "b"], "u2": ["c"]}
    assert {drop.code: drop.count for drop in source.report.drops} == {
        "duplicate": 1,
        "null_user": 1,
        "unparsable_time": 1,
    }


def test_flat_mixed_and_numeric_histories(tmp_path):
    path = tmp_path / "h.jsonl"
    rows = [
        {"user": 1, "history": ["a", ["b", 17850], 3.0, " c "]},
        {"user": "x", "history": []},
        {"user": 2.0, "history": None},
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = {user.user: user.history for user in open_histories(path).users}
    assert found == {"1": ["a", ["b", "17850"], "3", "c"], "x": [], "2": []}
    pl.DataFrame({"user": [1, 2], "history": [[5, 6], None]}).write_parquet(tmp_path / "h.parquet")
    assert [user.history for user in open_histories(tmp_path / "h.parquet").users] == [["5", "6"], []]


def test_an_item_column_makes_a_table_with_a_history_column_events(tmp_path):
    (tmp_path / "e.csv").write_text("user,item,history\nu,a,returning\nu,b,returning\n", encoding="utf-8")
    (user,) = open_histories(tmp_path / "e.csv", ColumnMap(item="item")).users
    assert user.history == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "history"),
    [
        ("", []),
        (" ; , ;", []),
        ("a", ["a"]),
        ("a,b", [["a", "b"]]),
        ("a, b ;c;d,e,", [["a", "b"], "c", ["d", "e"]]),
        ("<s_a_1><s_b_2>;a", ["<s_a_1><s_b_2>", "a"]),
    ],
)
def test_baskets_as_text(text, history):
    assert parse_baskets(text) == history


@pytest.mark.parametrize(
    ("name", "content", "code", "says"),
    [
        ("h.jsonl", '{"user": "a", "history": []}\n{"user": "b"}', "key_missing", "line 2"),
        ("h.jsonl", '{"user": "a", "history": []}\n{"history": []}', "key_missing", "line 2"),
        ("h.jsonl", '{"user": "a", "history": []}\n{"user": "b", "history"', "file_broken", "line 2"),
        ("h.jsonl", '{"user": "a", "history": []}\n[1]', "file_broken", "line 2"),
        ("h.jsonl", '{"user": "a", "history": "b"}', "history_invalid", "line 1"),
        ("h.jsonl", '{"user": "a", "history": ["b", null]}', "id_invalid", "line 1"),
        ("h.jsonl", '{"user": "a", "history": [["b", ["c"]]]}', "id_invalid", "line 1"),
        ("h.jsonl", '{"user": "a", "history": ["b", ""]}', "id_invalid", "line 1"),
        ("h.jsonl", '{"user": true, "history": ["b"]}', "id_invalid", "line 1"),
        ("h.jsonl", '{"person": "a", "history": ["b"]}', "column_missing", "person"),
        ("h.jsonl", "\n\n", "file_empty", "blank"),
        ("h.jsonl", b'{"user": "\xe9", "history": []}', "not_utf8", "0xe9"),
        ("h.jsonl.gz", b"no gzip", "file_broken", "h.jsonl.gz"),
        ("h.csv", "user,history\n,a", "id_invalid", "row 1"),
        ("h.csv", "person,history\nu,a", "column_missing", "person"),
        ("h.csv", "user,thing\nu,a", "column_missing", "thing"),
        ("h.xlsx", "user", "format_unknown", ".xlsx"),
        ("h.csv", "", "file_empty", "h.csv"),
    ],
)
def test_faulty_inputs_are_data_errors(tmp_path, name, content, code, says):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        list(open_histories(tmp_path / name).users)
    assert caught.value.code == code
    assert says in caught.value.message
    assert caught.value.remedy


def test_item_lists(tmp_path):
    (tmp_path / "ids.txt").write_text("\ufeffa\n\n b \na\n", encoding="utf-8")
    (tmp_path / "ids.csv").write_text("sku,price\n007,1\n8,2\n", encoding="utf-8")
    (tmp_path / "named.csv").write_text("thing\nx\n", encoding="utf-8")
    assert read_item_ids(tmp_path / "ids.txt") == ["a", "b"]
    assert read_item_ids(tmp_path / "ids.csv") == ["007", "8"]
    assert read_item_ids(tmp_path / "named.csv", "thing") == ["x"]
    assert read_item_ids(tmp_path / "ids.csv", "thing") == ["007", "8"]  # the flag names a column of --input
    (tmp_path / "none.txt").write_text("\n \n", encoding="utf-8")
    for name, code in [("none.txt", "file_empty"), ("named.csv", "column_missing"), ("absent.txt", "file_missing")]:
        with pytest.raises(PolyrecError) as caught:
            read_item_ids(tmp_path / name)
        assert caught.value.code == code


def test_output_names(tmp_path):
    assert [output_format(f"a/b{suffix}") for suffix in (".csv", ".TSV", ".pq", ".ndjson")] == [
        "csv",
        "tsv",
        "parquet",
        "jsonl",
    ]
    (tmp_path / "x.csv").mkdir()
    for name in ("b.xlsx", "b", "b.csv.gz", "b.inter", tmp_path / "x.csv"):
        with pytest.raises(DataError):
            output_format(name)
