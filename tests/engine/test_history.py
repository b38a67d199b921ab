"""Histories of requests: ids, SIDs, baskets, unknown entries."""

from __future__ import annotations

import numpy as np
import pytest

from polyrec.core.errors import RequestError
from polyrec.core.request import RecommendRequest
from polyrec.engine.history import check_counts, parse_history, row_of
from polyrec.sid.catalog import Catalog
from polyrec.sid.layout import SidLayout

LAYOUT = SidLayout.contiguous((3, 4), 5)
CATALOG = Catalog(["a", "b", "<s_a_0><s_b_1>"], np.array([[0, 1], [2, 3], [1, 1]]), [None] * 3, np.arange(3))


def parse(history, **options):
    return parse_history(RecommendRequest(history=history, **options), CATALOG, LAYOUT)


def test_ids_sids_and_baskets():
    parsed = parse(["b", ["a", "<s_a_1><s_b_1>"], "<|sid_begin|><s_a_2><s_b_3><|sid_end|>", ["a"]])
    assert parsed.rows.tolist() == [1, 0, 2, 1, 0]
    assert parsed.baskets.tolist() == [0, 1, 1, 2, 3]
    assert parsed.unknown == ()


def test_an_id_wins_over_a_sid_of_the_same_text():
    assert row_of("<s_a_0><s_b_1>", CATALOG, LAYOUT) == 2  # the item so named, not row 0 whose SID it is


def test_unknown_entries_leave_and_are_told_in_order():
    # no item; a SID without item; one of another depth; one out of range
    strangers = ["x", "<s_a_0><s_b_0>", "<s_a_0>", "<s_a_0><s_b_9>"]
    parsed = parse([strangers[0], ["a", strangers[1]], strangers[2:], "b"])
    assert parsed.rows.tolist() == [0, 1]
    assert parsed.baskets.tolist() == [1, 3]
    assert parsed.unknown == tuple(strangers)


def test_a_long_history_is_read_as_its_entries_are():
    """Ids are looked up together from some number on; the entries' kinds and their order do not change for it."""
    entries = ["b", "<s_a_1><s_b_1>", "x", "a", "<s_a_0><s_b_0>", "<s_a_0><s_b_1>"] * 50
    rows = [1, 2, None, 0, None, 2] * 50
    for history in (entries, [[entry] for entry in entries]):
        parsed = parse(history)
        assert parsed.rows.tolist() == [row for row in rows if row is not None]
        if history is entries:
            assert parsed.baskets is None
        else:
            assert parsed.baskets.tolist() == [place for place, row in enumerate(rows) if row is not None]
        assert parsed.unknown == ("x", "<s_a_0><s_b_0>") * 50


@pytest.mark.parametrize("history", [[], [[]], ["x"], [["x", "y"]]])
def test_nothing_known_gives_no_rows(history):
    parsed = parse(history)
    assert len(parsed.rows) == 0
    assert parsed.baskets is None or len(parsed.baskets) == 0


@pytest.mark.parametrize(
    ("history", "code", "told"),
    [
        ("ab", "list_expected", "history is 'ab'"),  # not the items a and b
        (b"ab", "list_expected", "history is"),
        (None, "list_expected", "history is None"),
        ([1, "a"], "list_expected", r"history\[0\] is 1"),
        (["a", None], "list_expected", r"history\[1\] is None"),
        (["a", [17]], "item_type", r"history\[1\] holds 17"),
        ([["a", ["b"]]], "item_type", r"history\[0\] holds \['b'\]"),
    ],
)
def test_histories_of_other_things_are_refused(history, code, told):
    with pytest.raises(RequestError, match=told) as caught:
        parse(history)
    assert caught.value.code == code


def test_any_collection_is_a_history():
    for history in (("a", ("b",)), np.array(["a", "b"]), iter(["a", "b"])):
        assert parse(history).rows.tolist() == [0, 1]


def test_unknown_entries_can_be_refused():
    with pytest.raises(RequestError, match="2 items of the history") as caught:
        parse(["a", "x", ["y"]], unknown="error")
    assert (caught.value.code, caught.value.status) == ("unknown_items", 400)
    assert parse(["a"], unknown="error").rows.tolist() == [0]


@pytest.mark.parametrize(
    ("n", "beam_width", "code"),
    [(0, None, "n_out_of_range"), (-2, 5, "n_out_of_range"), (5, 4, "beam_width_too_small")],
)
def test_counts_are_checked(n, beam_width, code):
    with pytest.raises(RequestError) as caught:
        check_counts(n, beam_width)
    assert caught.value.code == code
    check_counts(5, 5)
