"""Answers in JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrec.core.request import CardAnswer, Recommendation, RecommendedItem
from polyrec.server.schema import RecommendAnswer, encode_answer
from polyrec.sid.cards import written_cards

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
ITEMS = st.builds(
    RecommendedItem, TEXTS, st.floats(allow_nan=False, allow_infinity=False), st.just("<s_a_1>"), st.none() | TEXTS
)


def answer(score):
    return Recommendation((RecommendedItem("é", score, "<s_a_1>", None),), "level", unknown_items=("x",))


def in_cards(answer):
    """As the front finds it."""
    columns = [*zip(*answer.items, strict=True)] or [(), (), (), ()]
    cards = [memoryview(card) for card in written_cards(columns[0], columns[2], columns[3])]
    return CardAnswer(cards, [*columns[1]], answer.score_rule, answer.source, answer.unknown_items)


def test_an_answer_is_what_its_schema_says():
    text = encode_answer(answer(-1.5), request_id="r", timing_ms=2.0)
    assert RecommendAnswer.model_validate_json(text).model_dump() == json.loads(text)


@given(
    items=st.lists(ITEMS, max_size=5),
    unknown=st.lists(TEXTS, max_size=3),
    source=st.sampled_from(["model", "popularity"]),
)
def test_an_answer_comes_back_as_it_was(items, unknown, source):
    given = Recommendation(tuple(items), "sid", source, tuple(unknown))
    text = encode_answer(given, request_id="r", timing_ms=2.0)
    assert encode_answer(in_cards(given), request_id="r", timing_ms=2.0) == text
    assert json.loads(text) == {
        "request_id": "r",
        "items": [{"rank": rank, **item._asdict()} for rank, item in enumerate(items, start=1)],
        "score_rule": "sid",
        "source": source,
        "unknown_items": unknown,
        "timing_ms": 2.0,
    }


@pytest.mark.parametrize("num", [0, 1, 1024, 1025, 3000])
def test_ranks_count_from_1(num):
    found = CardAnswer([*written_cards(["a"] * num, ["s"] * num, [None] * num)], [0.5] * num, "level")
    items = json.loads(encode_answer(found, request_id="r", timing_ms=1.0))["items"]
    assert [item["rank"] for item in items] == list(range(1, num + 1))


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_is_not_answered(score):
    for found in (answer(score), in_cards(answer(score))):
        with pytest.raises(AssertionError, match="no number"):
            encode_answer(found, request_id="r", timing_ms=1.0)


def test_each_item_has_a_score():
    with pytest.raises(AssertionError, match="each item"):
        encode_answer(CardAnswer([b"", b""], [0.5], "level"), request_id="r", timing_ms=1.0)
