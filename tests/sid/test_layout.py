"""SID layout: token ids, texts, and reading both back."""

import numpy as np
import pytest

from polyrec.core.errors import CatalogError
from polyrec.sid.layout import BEGIN, END, SidLayout, code_token


def vocabulary(sizes: tuple[int, ...], first: int = 3) -> dict[str, int]:
    """Written out by hand, token after token."""
    texts = [f"<s_{'abcdefgh'[level]}_{code}>" for level, size in enumerate(sizes) for code in range(size)]
    return {"a": 0, "<s_a_x>": 1, "s_a_0": 2} | {
        text: first + place for place, text in enumerate([*texts, "<|sid_begin|>", "<|sid_end|>"])
    }


@pytest.mark.parametrize("sizes", [(1,), (5, 3), (4, 4, 4), (2, 3, 5, 7)])
def test_contiguous_layout_agrees_with_a_vocabulary(sizes):
    tokens = vocabulary(sizes)
    layout = SidLayout.from_vocabulary(tokens)
    assert layout == SidLayout.contiguous(sizes, 3)
    assert (layout.depth, layout.num_tokens) == (len(sizes), sum(sizes))
    assert (layout.begin, layout.end) == (tokens[BEGIN], tokens[END])
    codes = np.stack([np.random.default_rng(0).integers(0, size, 9) for size in sizes], axis=1)
    for row, ids in zip(codes, layout.tokens(codes), strict=True):
        assert ids.tolist() == [tokens[code_token(level, code)] for level, code in enumerate(row)]
    assert SidLayout(**layout.to_dict() | {"codebook_sizes": sizes, "level_starts": layout.level_starts}) == layout


def test_every_sid_text_parses_back():
    layout = SidLayout.contiguous((3, 2, 11), 7)
    for codes in np.ndindex(3, 2, 11):
        text = layout.text(np.array(codes))
        assert layout.parse(text) == codes
        assert layout.parse(f" {BEGIN}{text}{END}\n") == codes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<s_a_0><s_b_0>",
        "<s_a_0><s_b_0><s_c_0><s_c_0>",
        "<s_b_0><s_a_0><s_c_0>",
        "<s_a_3><s_b_0><s_c_0>",
        "<s_a_0> <s_b_0><s_c_0>",
        "x<s_a_0><s_b_0><s_c_0>",
        "<s_a_0><s_b_0><s_d_0>",
        "<s_a_-1><s_b_0><s_c_0>",
    ],
)
def test_what_is_not_one_whole_sid_is_none(text):
    assert SidLayout.contiguous((3, 2, 11), 7).parse(text) is None


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        (BEGIN, "sid_tokens_missing"),
        (END, "sid_tokens_missing"),
        ("<s_a_0>", "sid_tokens_not_contiguous"),
        ("<s_a_1>", "sid_tokens_not_contiguous"),
        ("<s_b_0>", "sid_tokens_not_contiguous"),
    ],
)
def test_a_vocabulary_with_a_gap_is_refused(lost, code):
    tokens = vocabulary((3, 2, 2))
    del tokens[lost]
    with pytest.raises(CatalogError) as caught:
        SidLayout.from_vocabulary(tokens)
    assert caught.value.code == code


def test_levels_need_not_follow_one_another():
    tokens = {"<s_b_0>": 0, "<s_b_1>": 1, BEGIN: 2, "<s_a_0>": 10, "<s_a_1>": 11, "<s_a_2>": 12, END: 99}
    assert SidLayout.from_vocabulary(tokens) == SidLayout((3, 2), (10, 0), 2, 99)


def test_a_code_has_one_spelling():
    tokens = vocabulary((3, 2)) | {"<s_a_01>": 90, "<s_a_\u0662>": 91}
    assert SidLayout.from_vocabulary(tokens) == SidLayout.contiguous((3, 2), 3)
    assert SidLayout.contiguous((3, 2), 3).parse("<s_a_01><s_b_0>") is None


def test_swapped_codes_and_a_missing_level_are_refused():
    tokens = vocabulary((3, 2))
    tokens["<s_a_1>"], tokens["<s_a_2>"] = tokens["<s_a_2>"], tokens["<s_a_1>"]
    with pytest.raises(CatalogError) as caught:
        SidLayout.from_vocabulary(tokens)
    assert caught.value.code == "sid_tokens_not_contiguous"
    tokens = {text: token for token, text in enumerate(["<s_a_0>", "<s_c_0>", BEGIN, END])}
    with pytest.raises(CatalogError) as caught:
        SidLayout.from_vocabulary(tokens)
    assert caught.value.code == "sid_tokens_missing"
