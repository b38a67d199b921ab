"""Packed texts and their index, against lists and dictionaries."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrec.sid import strings
from polyrec.sid.strings import StringIndex, Strings

TEXTS = ["", "a", None, "Näme «7»", "b" * 700, "日本", None, "a\x00", "\x00a", "item-12", "x"]


@pytest.mark.parametrize("texts", [[], [None], [""], TEXTS, TEXTS * 3])
@pytest.mark.parametrize("rows_at_a_time", [2, 1000])
def test_packed_texts_are_the_texts(texts, rows_at_a_time, monkeypatch):
    monkeypatch.setattr(strings, "_ROWS_AT_A_TIME", rows_at_a_time)
    packed = Strings.of(texts)
    assert list(packed) == texts
    assert [packed[row] for row in range(len(packed))] == texts
    assert [packed[row - len(texts)] for row in range(len(texts))] == texts
    assert packed[1:8:3] == texts[1:8:3]
    assert list(Strings.of(packed)) == texts
    with pytest.raises(IndexError):
        packed[len(texts)]


def test_numpy_numbers_index_texts():
    assert Strings.of(TEXTS)[np.int64(3)] == TEXTS[3]


@pytest.mark.parametrize("num_texts", [1, 2, 3, 50, 3000])
def test_the_index_finds_what_a_dictionary_finds(num_texts):
    rng = np.random.default_rng(num_texts)
    letters = list("abcé日\x00 ")
    texts = sorted({"".join(rng.choice(letters, rng.integers(0, 14))) for _ in range(2 * num_texts)})
    rng.shuffle(texts)
    known, others = texts[:num_texts], texts[num_texts:]
    index = StringIndex.of(Strings.of(known))
    rows = {text: row for row, text in enumerate(known)}
    for text in [*known, *others, "", "\x00", "\ud800", "z" * 5000]:
        assert index.find(text) == rows.get(text)


@pytest.mark.parametrize("num_asked", [0, 1, 50, 51, 100, 700])
@pytest.mark.parametrize("odd", [None, "\x00", "a\x00b", "\ud800", "z" * 5000])
def test_looking_up_together_finds_what_a_dictionary_finds(num_asked, odd):
    """Known and unknown, in any mixture and repeated; `odd` among them."""
    rng = np.random.default_rng(num_asked)
    letters = list("abcé日 ")
    texts = sorted({"".join(rng.choice(letters, rng.integers(0, 14))) for _ in range(2000)})
    rng.shuffle(texts)
    known = texts[: len(texts) // 2]
    index = StringIndex.of(Strings.of(known))
    rows = {text: row for row, text in enumerate(known)}
    asked = [texts[place] for place in rng.integers(0, len(texts), num_asked)]
    if odd is not None:
        asked.insert(len(asked) // 2, odd)
    found = index.find_all(asked)
    assert found.dtype == np.int64
    assert found.tolist() == [rows.get(text, -1) for text in asked]


def test_one_long_text_among_many_costs_no_memory_for_all():
    """Each text takes the room of the longest beside it."""
    index = StringIndex.of(Strings.of([str(row) for row in range(10)]))
    asked = ["7"] * 100_000
    asked[50] = "x" * 256
    tracemalloc.start()
    found = index.find_all(asked)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tolist() == [7] * 50 + [-1] + [7] * 99_949
    assert peak < 40e6


@pytest.mark.parametrize("num_buckets", [1, 2, 7])
def test_texts_of_one_bucket_are_told_apart(num_buckets):
    """Chains of many, whose members differ in one byte or in length alone; also those that are one number."""
    texts = ["", *("\x01" * length for length in range(1, 40)), *(f"{row:04d}" for row in range(200))]
    zeros = ["\x00" * length for length in range(1, 30)]
    for known in (texts, [*texts, *zeros], zeros):
        index = StringIndex.of(Strings.of(known), num_buckets)
        asked = [*texts, *zeros, "x", "0200", "\x01" * 40] * 2
        rows = {text: row for row, text in enumerate(known)}
        for part in (asked, [text for text in asked if "\x00" not in text]):
            assert index.find_all(part).tolist() == [rows.get(text, -1) for text in part]
            assert [index.find(text) for text in part] == [rows.get(text) for text in part]


@settings(max_examples=200, deadline=None)
@given(
    known=st.lists(st.text(st.sampled_from("ab0é日 \x00"), max_size=40), min_size=1, max_size=150, unique=True),
    others=st.lists(st.text(st.sampled_from("ab0é日 \x00\ud800"), max_size=40), max_size=30),
    num_buckets=st.sampled_from([None, 1, 3]),
    drawn=st.randoms(),
)
def test_together_or_alone_it_finds_what_a_dictionary_finds(known, others, num_buckets, drawn):
    """With and without zero bytes, in the catalog and in what is asked."""
    for without in ("\n", "\x00", "é日\ud800", "\x00é日\ud800"):
        texts = [text for text in known if not set(text) & set(without)]
        wanted = [text for text in [*texts, *others] if not set(text) & set(without)]
        index = StringIndex.of(Strings.of(texts), num_buckets)
        rows = {text: row for row, text in enumerate(texts)}
        asked = [drawn.choice(wanted) for _ in range(200)] if wanted else []
        assert index.find_all(asked).tolist() == [rows.get(text, -1) for text in asked]
        assert [index.find(text) for text in wanted] == [rows.get(text) for text in wanted]


@pytest.mark.parametrize("longest", [1, 31, 32, 33, 255, 256, 257])
def test_texts_of_any_length_are_found_together(longest):
    texts = [str(row).rjust(min(longest, 1 + row % 40), "x") for row in range(10 if longest == 1 else 600)]
    texts = list({text[-longest:] for text in [*texts, "y" * longest]})
    index = StringIndex.of(Strings.of(texts))
    rows = {text: row for row, text in enumerate(texts)}
    for others in ([], ["z" * longest], ["z" + "y" * longest], ["z" * 400]):
        asked = (texts + others) * 20
        assert index.find_all(asked).tolist() == [rows.get(text, -1) for text in asked]


@pytest.mark.parametrize("num", [0, 1, 100, 101, 600])
@pytest.mark.parametrize(
    "texts", [["a"], [None], [""], [text for text in TEXTS if text is None or "\x00" not in text], TEXTS]
)
def test_taken_texts_are_the_texts(texts, num):
    rows = np.random.default_rng(num).integers(0, len(texts), num)
    assert Strings.of(texts).taken(rows) == [texts[row] for row in rows]


def test_regular_ids_spread_over_the_buckets():
    """Numbered ids must not fall into few buckets, or each look-up would read many."""
    for texts in (
        [f"item-{row}" for row in range(20_000)],
        [f"{row:010d}" for row in range(20_000)],
        [f"B{row * 97:08X}" for row in range(20_000)],
    ):
        cells = StringIndex.of(Strings.of(texts)).cells
        full = (cells != strings.EMPTY).all(axis=1)
        assert full.mean() < 0.02
        assert not (full[:-3] & full[1:-2] & full[2:-1] & full[3:]).any()


def number_of(text: str) -> int:
    """Of 8 bytes."""
    return int.from_bytes(text.encode(), "little")


def test_texts_of_one_number_are_told_apart() -> None:
    """By a multiplier chosen so that a text has the number of a longer one."""
    shorter, longer = "bcdefghi", "abcdefghijklmnop"
    multiplier = (number_of(shorter) - number_of(longer[:8])) * pow(number_of(longer[8:]), -1, 1 << 64) % (1 << 64)
    numbers = {strings._number(text.encode(), multiplier) for text in (shorter, longer)}
    assert len(numbers) == 1
    many = [f"k{number:013d}" for number in range(60)]
    for one, other in ((shorter, longer), (longer, shorter)):
        index = StringIndex.of(Strings.of([one, *many]), multiplier=multiplier)
        assert index.find(other) is None
        assert index.find_all([*many, other]).tolist() == [*range(1, 61), -1]
        index = StringIndex.of(Strings.of([one, *many, other]), multiplier=multiplier)
        assert index.find_all([*many, other, one]).tolist() == [*range(1, 62), 0]


@pytest.mark.parametrize("number", [0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF00000003, 0xFFFFFFFF0000003D])
def test_numbers_that_look_like_empty_cells_lose_nothing(number: int) -> None:
    """By a multiplier that gives the text this number: XOR row 0 it is EMPTY, and XOR an empty cell a row."""
    odd, multiplier = "abcdefgh", number * pow(number_of("abcdefgh"), -1, 1 << 64) % (1 << 64)
    assert strings._number(odd.encode(), multiplier) == number
    many = [f"k{place:07d}" for place in range(60)]
    for known in ([odd, *many], many, [*many, odd]):
        index = StringIndex.of(Strings.of(known), multiplier=multiplier)
        rows = {text: row for row, text in enumerate(known)}
        for asked in ([odd, *many], [*many, odd, "another"], [odd] * 60):
            assert index.find_all(asked).tolist() == [rows.get(text, -1) for text in asked]
            assert [index.find(text) for text in asked] == [rows.get(text) for text in asked]


@pytest.mark.parametrize("longest", [9, 100])
@pytest.mark.parametrize("letter", ["x", "é", "語"])
def test_odd_ones_among_many_change_nothing_for_the_others(longest: int, letter: str) -> None:
    """Texts longer than any that is known, with zeros, unknown ones, and ones that JSON can carry and UTF-8 cannot."""
    known = [f"{number:0{longest - 3}d}{letter}" for number in range(500)]
    index = StringIndex.of(Strings.of(known))
    odd = ["<s_a_1><s_b_2><s_c_3>" * 9, "a\0b", "\0" + known[0], "nobody", "", "\ud800", known[7] + known[8]]
    for some in (odd, odd[:1], odd[1:2], odd[3:4]):
        asked = [*known[3:80], *some, *known[100:140]]
        expected = [*range(3, 80), *[-1] * len(some), *range(100, 140)]
        assert index.find_all(asked).tolist() == expected
        assert [index.find(text) for text in some] == [None] * len(some)


def test_a_few_long_texts_among_short_ones_are_found() -> None:
    known = [f"i{number}" * (40 if number % 500 == 0 else 1) for number in range(3000)]
    index = StringIndex.of(Strings.of(known))
    assert index.find_all(known).tolist() == list(range(3000))
    assert [index.find(text) for text in known] == list(range(3000))
