"""Cases read from text, and the check of every answer."""

import numpy as np
import pytest

from polyrec.bench.cases import Case, Target, fault_of
from polyrec.core.errors import ConfigError
from polyrec.data.prompt import PromptBuilder, PromptConfig
from polyrec.sid.catalog import Catalog
from polyrec.sid.layout import SidLayout

CODES = np.array(list(np.ndindex(3, 4, 5)), np.int32)
CATALOG = Catalog([f"i{row}" for row in range(60)], CODES, [None] * 60, np.zeros(60))


def target(**prompt) -> Target:
    return Target(None, CATALOG, PromptConfig(max_items=900, **prompt))


@pytest.mark.parametrize("basket_token", [False, True])
@pytest.mark.parametrize("tokens", [2, 100, 101, 2455])
def test_a_history_makes_at_least_the_tokens_asked_for(tokens, basket_token):
    one = target(basket_token=basket_token)
    (case,) = one.cases([f"{tokens}:5:1"])
    builder = PromptBuilder(SidLayout.contiguous((3, 4, 5), 0), one.prompt)
    lengths = [
        len(builder.build(CODES[np.zeros(items, int)], np.arange(items))) for items in (case.items, case.items - 1)
    ]
    assert lengths[0] == one.tokens_of(case.items) >= tokens
    assert case.items == 1 or lengths[1] < tokens


def test_a_text_gives_a_case_for_each_load():
    cases = target().cases(["h20:7:1,8", "h3:60:2:400"])
    assert cases == [Case(20, 7, 1), Case(20, 7, 8), Case(3, 60, 2, requests=400)]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("20:7", "case_invalid"),
        ("20:7:1,", "case_invalid"),
        ("x20:7:1", "case_invalid"),
        ("-20:7:1", "case_invalid"),
        ("h901:7:1", "case_out_of_range"),
        ("h0:7:1", "case_out_of_range"),
        ("h20:61:1", "case_out_of_range"),
        ("h20:0:1", "case_out_of_range"),
        ("h20:7:0", "case_out_of_range"),
        ("h20:7:1:0", "case_out_of_range"),
        ("h20:7:1:", "case_invalid"),
    ],
)
def test_what_cannot_be_asked_is_refused(text, code):
    with pytest.raises(ConfigError) as caught:
        target().cases([text])
    assert caught.value.code == code


def test_histories_differ_and_repeat_by_seed():
    first, again, other = (target().histories(4, 9, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(history) for history in first}) == 4
    assert {len(history) for history in first} == {9}
    assert all(CATALOG.row(item) is not None for history in first for item in history)


def answer(rows):
    return [(f"i{row}", "".join(f"<s_{'abc'[level]}_{code}>" for level, code in enumerate(CODES[row]))) for row in rows]


def test_only_n_distinct_items_with_their_own_sids_pass():
    good = answer([5, 59, 0])
    assert fault_of(good, 3, CATALOG) is None
    assert "2 items instead of 3" in fault_of(good[:2], 3, CATALOG)
    assert "twice" in fault_of([*good[:2], good[0]], 3, CATALOG)
    assert "not in the catalog" in fault_of([*good[:2], ("i60", "<s_a_2>")], 3, CATALOG)
    assert "the catalog has" in fault_of([*good[:2], ("i1", answer([2])[0][1])], 3, CATALOG)
