"""Cards are JSON, whatever the texts; and each leaf has its own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrec.sid import cards as cards_module
from polyrec.sid.cards import Cards, sids_of, written_cards
from polyrec.sid.catalog import Catalog
from polyrec.sid.layout import SidLayout

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # a catalog holds UTF-8, so no surrogates
ODD = ['"', "\\", '\\"', "\0", "\n\t\b\x1f\x7f", "é", "日本語", "😀", "\u2028", "</script>", '","name":"x"}', ""]


def read(card: memoryview | bytes) -> dict[str, object]:
    """The card as an item that has a rank before it."""
    item = json.loads(b'{"rank":1' + bytes(card))
    assert item.pop("rank") == 1
    return item


@given(item_id=TEXTS, name=st.none() | TEXTS)
def test_any_text_comes_back(item_id, name):
    (card,) = written_cards([item_id], ["<s_a_1>"], [name])
    assert read(card) == {"item_id": item_id, "sid": "<s_a_1>", "name": name}


@pytest.mark.parametrize("widest", [8, 60, 512])
@pytest.mark.parametrize("at_once", [1, 5, 100])
def test_each_leaf_has_its_item_s_card(monkeypatch, at_once, widest):
    """Whether all are too long to be laid out, some, or only the longest."""
    monkeypatch.setattr(cards_module, "_BUILT_AT_ONCE", at_once)
    monkeypatch.setattr(cards_module, "_WIDEST", widest)
    rng = np.random.default_rng(0)
    names = [*ODD, None, *map(str, range(20))]
    codes = rng.permutation(np.stack(np.unravel_index(np.arange(len(names)), (5, 5, 5)), axis=1)) * 3
    catalog = Catalog([f"id {text}{row}" for row, text in enumerate(names)], codes, names, np.zeros(len(names)))
    layout = SidLayout.contiguous((16, 16, 16), 0)
    assert len(catalog.cards) == len(names)
    assert (len(catalog.cards.long) == len(names), len(catalog.cards.long) == 0) == (widest == 8, widest == 512)
    leaves = rng.permutation(len(names))
    for leaf, card in zip(leaves, catalog.cards.taken(leaves), strict=True):
        row = int(catalog.trie.rows[leaf])
        sid = layout.text(catalog.codes[row])
        assert read(card) == {"item_id": catalog.item_ids[row], "sid": sid, "name": catalog.names[row]}
    assert catalog.cards.taken(leaves[:0]) == []


def test_a_few_long_names_make_no_table_wide():
    names = ["short"] * 199 + ["long" * 200]
    catalog = Catalog([*map(str, range(200))], np.arange(200)[:, None], names, np.zeros(200))
    assert catalog.cards.laid.shape[1] < 100
    assert [read(card)["name"] for card in catalog.cards.taken(np.array([199, 0, 199]))] == [
        names[199],
        "short",
        names[199],
    ]


def test_no_leaves_have_no_cards():
    catalog = Catalog(["a"], np.zeros((1, 2), int), [None], [0])
    cards = Cards.of(catalog.item_ids, catalog.codes, catalog.names, np.zeros(0, int))
    assert (len(cards), cards.taken(np.zeros(0, int))) == (0, [])


@pytest.mark.parametrize("depth", [1, 3, 26])
def test_sids_are_the_layout_s(depth):
    codes = np.random.default_rng(depth).integers(0, 9, (7, depth))
    assert sids_of(codes) == [SidLayout.contiguous((9,) * depth, 0).text(line) for line in codes]
    assert sids_of(codes[:0]) == []
