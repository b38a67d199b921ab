"""Answers in JSON."""

from __future__ import annotations

import json

import pytest

from polyrec.core.request import Recommendation, RecommendedItem
from polyrec.server.schema import RecommendAnswer, encode_answer


def answer(score):
    return Recommendation((RecommendedItem("é", score, "<s_a_1>", None),), "level", unknown_items=("x",))


def test_an_answer_is_what_its_schema_says():
    text = encode_answer(answer(-1.5), request_id="r", timing_ms=2.0)
    assert RecommendAnswer.model_validate_json(text).model_dump() == json.loads(text)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_is_not_answered(score):
    with pytest.raises(AssertionError, match="no number"):
        encode_answer(answer(score), request_id="r", timing_ms=1.0)
