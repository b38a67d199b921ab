"""`polyrec recommend`: the answers of the recommender, on the terminal and in files; flags, summaries, mistakes."""

from __future__ import annotations

import json

import polars as pl
import pytest

from polyrec.core.errors import PolyrecError
from polyrec.engine.recommender import Recommender

HISTORY = "P001,P004;P007"
BASKETS = [["P001", "P004"], "P007"]


@pytest.fixture(scope="module")
def recommender(shop):
    return Recommender.from_pretrained(shop / "model")


@pytest.fixture(scope="module")
def orders(shop):
    """user -> orders, straight from the CSV."""
    orders = {}
    events = pl.read_csv(shop / "events.csv")
    for (user, _), order in events.group_by("customer_id", "order_id", maintain_order=True):
        orders.setdefault(user, []).append(order["product_id"].to_list())
    return orders


def test_one_history_as_json(polyrec, shop, recommender):
    flags = ["--history", HISTORY, "-n", 7, "--exclude-seen", "--exclude", "P010,P011", "--beam-width", 20, "--json"]
    answer = json.loads(polyrec("recommend", shop / "model", *flags).stdout)
    expected = recommender.recommend(BASKETS, n=7, exclude_seen=True, exclude=["P010", "P011"], beam_width=20)
    assert [item["item_id"] for item in answer["items"]] == expected.item_ids
    assert answer["items"][0] == {
        "rank": 1,
        "item_id": expected.items[0].item_id,
        "score": pytest.approx(expected.items[0].score, abs=1e-5),
        "sid": expected.items[0].sid,
        "name": expected.items[0].name,
    }
    assert (answer["source"], answer["score_rule"], answer["unknown_items"]) == ("model", "level", [])


def test_one_history_as_a_table(polyrec, shop, recommender):
    result = polyrec("recommend", shop / "model", "--history", f"{HISTORY};[b]x", "-n", 3)
    for item in recommender.recommend(BASKETS, n=3).items:
        assert all(text in result.stdout for text in (item.item_id, item.name, item.sid, f"{item.score:.3f}"))
    assert "Alder Tent Pegs" in result.stdout
    assert all(text in result.stdout for text in ("[b]x", "not in the catalog"))
    cold = polyrec("recommend", shop / "model", "--history", "", "-n", 2).stdout
    assert all(text in cold for text in ("popularity", *recommender.recommend([], n=2).item_ids))
    none = polyrec("recommend", shop / "model", "--history", "P001", "--allow", "P002", "--exclude", "P002").stdout
    assert "all are excluded" in none


def test_a_file_of_events(polyrec, shop, recommender, orders, tmp_path):
    out = tmp_path / "out.parquet"
    events = ["--input", shop / "events.csv", "--time-column", "ordered_at", "--output", out]
    result = polyrec("recommend", shop / "model", *events, "-n", 4, "--exclude-seen", "--batch-size", 16)
    table = pl.read_parquet(out)
    assert table["user"].unique(maintain_order=True).to_list() == sorted(orders)
    assert table["rank"].to_list() == [1, 2, 3, 4] * len(orders)
    assert set(table["source"]) == {"model"}
    for user in sorted(orders)[::40]:
        expected = recommender.recommend([sorted(order) for order in orders[user]], n=4, exclude_seen=True)
        assert table.filter(pl.col("user") == user)["item_id"].to_list() == expected.item_ids
    assert f"{len(orders)} users, {4 * len(orders):,} recommendations" in result.stderr
    assert not any(text in result.stderr for text in ("dropped", "popular", "warning"))


def test_the_summary_counts_what_was_left_out(polyrec, shop, tmp_path):
    users = [
        {"user": "a", "history": ["P001", "gone"]},
        {"user": "b", "history": ["gone", "lost"]},
        {"user": "c", "history": []},
    ]
    path = tmp_path / "users.jsonl"
    path.write_text("\n".join(map(json.dumps, users)), encoding="utf-8")
    files = ["recommend", shop / "model", "--input", path, "--output", tmp_path / "out.csv", "-n", 2]
    words = polyrec(*files).stderr
    assert "3 users, 6 recommendations" in words
    assert "2 users without any known item" in words
    assert "3 of 4 history entries were dropped: 2 items" in words
    assert "gone (2×)" in words
    summary = json.loads(polyrec(*files, "--json").stdout)
    assert (summary["users"], summary["popularity"], summary["unknown_entries"]) == (3, 2, 3)
    assert summary["data"] is None
    for flags, code in [(["--unknown", "error"], "unknown_items"), (["--cold", "error"], "cold_history")]:
        with pytest.raises(PolyrecError, match="User '") as caught:
            polyrec(*files, *flags)
        assert caught.value.code == code


def test_a_wrong_item_column_is_noticed(polyrec, shop, tmp_path):
    columns = ["--item-column", "order_id", "--basket-column", "none", "--time-column", "ordered_at"]
    files = ["--input", shop / "events.csv", "--output", tmp_path / "out.csv", "-n", 1]
    words = polyrec("recommend", shop / "model", *files, *columns).stderr
    assert all(text in words for text in ("No item of any history is known", "'P001'"))


def test_drops_of_the_event_table_are_shown(polyrec, shop, tmp_path):
    path = tmp_path / "events.csv"
    path.write_text("user,item,time\na,P001,2024-01-01\na,,2024-01-02\n", encoding="utf-8")
    files = ["--input", path, "--output", tmp_path / "out.csv", "-n", 1]
    assert "row without an item" in polyrec("recommend", shop / "model", *files).stderr
    data = json.loads(polyrec("recommend", shop / "model", *files, "--json").stdout)["data"]
    assert [drop["code"] for drop in data["drops"]] == ["null_item"]


def test_filters_from_files(polyrec, shop, recommender, tmp_path):
    (tmp_path / "allow.csv").write_text("sku\nP010\nP020\nP030\n", encoding="utf-8")
    (tmp_path / "no.txt").write_text("P020\n", encoding="utf-8")
    flags = ["--allow", tmp_path / "allow.csv", "--exclude", tmp_path / "no.txt", "--json"]
    answer = json.loads(polyrec("recommend", shop / "model", "--history", HISTORY, *flags).stdout)
    assert sorted(item["item_id"] for item in answer["items"]) == ["P010", "P030"]
    words = polyrec("recommend", shop / "model", "--history", HISTORY, "--exclude", "P001,nope").stderr
    assert "1 of 2 items in --exclude are not in the catalog, the first is 'nope'" in words


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ([], "input_or_history"),
        (["--input", "{shop}/events.csv", "--history", "P001"], "input_or_history"),
        (["--input", "{shop}/events.csv"], "output_missing"),
        (["--history", "P001", "--output", "{tmp}/x.csv"], "output_unused"),
        (["--history", "P001", "--time-column", "ordered_at"], "flag_unused"),
        (["--input", "{shop}/events.csv", "--output", "{shop}/events.csv"], "output_is_input"),
        (["--input", "{shop}/events.csv", "--output", "{tmp}/x.xlsx"], "format_unknown"),
        (["--input", "{shop}/event.csv", "--output", "{tmp}/x.csv"], "file_missing"),
        (["--input", "{shop}/events.csv", "--output", "{tmp}/x.csv", "--format", "xml"], "format_unknown"),
        (["--input", "{shop}/events.csv", "--output", "{tmp}/x.csv", "--user-column", "who"], "column_missing"),
        (["--input", "{shop}/items.csv", "--output", "{tmp}/x.csv"], "column_missing"),
        (["--history", "P001", "--exclude", "absent.txt"], "file_missing"),
        (["--history", "P001", "--exclude", ","], "items_empty"),
        (["--history", "P001", "--allow", "nope"], "unknown_items"),
        (["--history", "P001", "-n", "5", "--beam-width", "4"], "beam_width_too_small"),
        (["--history", "nope", "--cold", "error"], "cold_history"),
        (["--history", "P001;nope", "--unknown", "error"], "unknown_items"),
    ],
)
def test_mistakes(polyrec, shop, tmp_path, flags, code):
    flags = [flag.format(shop=shop, tmp=tmp_path) for flag in flags]
    with pytest.raises(PolyrecError) as caught:
        polyrec("recommend", shop / "model", *flags)
    assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []
