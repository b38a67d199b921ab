"""Answers in JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrec.core.errors import RequestError
from polyrec.core.request import CardAnswer, Recommendation, RecommendedItem
from polyrec.server.schema import (
    RecommendAnswer,
    RecommendBody,
    _plain_request,
    encode_answer,
    parse_body,
    parse_recommend,
)
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


def outcome(parse, body):
    """What comes of it: a request and its time, or all that a client is told."""
    try:
        asked, timeout_ms = parse(body)
        return dataclasses.replace(asked, exclude=[*asked.exclude]), timeout_ms
    except RequestError as error:
        return error.code, error.message, error.remedy, error.status


def by_the_model(body):
    parsed = parse_body(RecommendBody, body)
    return parsed.to_request(512), parsed.timeout_ms


VALUES = st.sampled_from(
    [
        "1",
        "0",
        "-0",
        "-1",
        "600",
        "10.0",
        "1e1",
        "true",
        "null",
        '"1"',
        "9223372036854775808",
        "1" * 30,
        "NaN",
        "[]",
        "{}",
    ]
)
ENTRIES = st.sampled_from(
    [
        '"a"',
        '"é"',
        '"\\u0041"',
        '"\\u0000"',
        '"\\ud800"',
        '"\\ud83d\\ude00"',
        '""',
        f'"{"x" * 513}"',
        "1",
        "null",
        '["a", "b"]',
        "[]",
    ]
)
HISTORIES = st.lists(ENTRIES, max_size=4).map(lambda entries: "[" + ", ".join(entries) + "]") | VALUES
KEYS = st.sampled_from(
    ["n", "n", "beam_width", "exclude_seen", "timeout_ms", "exclude", "allow", "unknown", "cold", "N", "history"]
)
MEMBERS = st.lists(st.tuples(KEYS, VALUES | st.just('["a"]') | st.just('"error"')), max_size=3)


@given(
    histories=st.lists(HISTORIES, max_size=2), members=MEMBERS, tail=st.sampled_from(["", "", "", " ", ",", "x", "\0"])
)
def test_the_short_way_says_what_the_model_says(histories, members, tail):
    """Also of keys that come twice."""
    told = [*(("history", history) for history in histories), *members]
    body = ("{" + ", ".join(f'"{key}": {value}' for key, value in told) + "}" + tail).encode()
    assert outcome(lambda body: parse_recommend(body, 512), body) == outcome(by_the_model, body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"history"',
        b"\xef\xbb\xbf" + b'{"history": ["a"]}',
        b'{"history": ["\xff"]}',
        b'{"history": ["a\n"]}',
        b'{"history": ["a",]}',
        b'{"history": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"history": [' + b'"a", ' * 10_000 + b'"a"]}',
        '{"history": ["a"]}'.encode("utf-16"),
    ],
)
def test_odd_bodies_are_the_models_to_judge(body):
    assert outcome(lambda body: parse_recommend(body, 512), body) == outcome(by_the_model, body)


def test_usual_bodies_go_the_short_way():
    for rest in ({}, {"n": 5}, {"n": 5, "beam_width": 9}, {"exclude_seen": True}, {"timeout_ms": 50}):
        found = _plain_request(json.dumps({"history": ["a", "b"]} | rest).encode())
        assert found is not None
        assert found[1] == rest.get("timeout_ms")
