"""The front prepares and finishes in whatever process, and needs no torch for it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyrec.core.errors import RequestError
from polyrec.core.request import Recommendation, RecommendedItem, RecommendRequest
from polyrec.data.prompt import PromptConfig
from polyrec.engine.folder import read_folder
from polyrec.engine.front import EngineFacts, Front
from polyrec.engine.recommender import Recommender
from polyrec.engine.searches import SearchResult
from polyrec.testing.tiny import write_tiny_model

NUM_ITEMS = 90
ITEM = st.one_of(
    st.integers(0, NUM_ITEMS - 1).map(lambda row: f"item-{row}"),
    st.tuples(*[st.integers(0, 17)] * 3).map(lambda codes: "<s_a_{}><s_b_{}><s_c_{}>".format(*codes)),
    st.sampled_from(["", "nothing", "é", "\ud800"]),
)
ITEMS = st.lists(ITEM, max_size=60)
REQUESTS = st.builds(
    RecommendRequest,
    history=st.lists(st.one_of(ITEM, ITEMS), max_size=60),
    n=st.integers(-1, 200),
    beam_width=st.none() | st.integers(0, 200),
    exclude=ITEMS,
    allow=st.none() | ITEMS,
    exclude_seen=st.booleans(),
    unknown=st.sampled_from(["drop", "error"]),
    cold=st.sampled_from(["popular", "error"]),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("front") / "tiny", num_items=NUM_ITEMS)


@pytest.fixture(scope="module")
def recommender(folder):
    return Recommender.from_pretrained(folder)


@pytest.fixture(scope="module")
def front(folder, recommender):
    """As a process without the engine makes it: from the folder, and what it was told."""
    return Front.of_folder(read_folder(folder), pickle.loads(pickle.dumps(recommender.front.facts)))


def outcome(function, *args):
    """What a call returns or refuses, in a form that compares."""
    try:
        found = function(*args)
    except RequestError as error:
        return error.code, error.message, error.remedy, error.status
    if isinstance(found, Recommendation):
        return found
    lists = (found.search.prompt, found.search.excluded, found.search.allowed)
    lists = [None if each is None else np.asarray(each).tolist() for each in lists]
    return lists, found.search.n, found.search.beam_width, found.unknown


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(request=REQUESTS)
def test_elsewhere_it_prepares_as_beside_the_engine(front, recommender, request):
    assert outcome(front.prepare, request) == outcome(recommender.prepare, request)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(tokens=st.lists(st.integers(-1, 200), max_size=200), n=st.integers(0, 100), ends=st.booleans())
def test_elsewhere_it_prepares_prompts_as_beside_the_engine(front, recommender, tokens, n, ends):
    tokens = [*tokens, recommender.layout.begin] if ends else tokens
    assert outcome(front.prepare_prompt, tokens, n) == outcome(recommender.prepare_prompt, tokens, n)


def test_a_prompt_of_the_longest_length_is_taken_and_a_longer_one_is_not(front):
    most = front.facts.max_prompt_tokens
    begin = front.layout.begin
    assert len(front.prepare_prompt([begin] * most, 3).search.prompt) == most
    with pytest.raises(RequestError) as caught:
        front.prepare_prompt([begin] * (most + 1), 3)
    assert caught.value.code == "prompt_too_long"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(leaves=st.lists(st.integers(0, NUM_ITEMS - 1), unique=True, max_size=NUM_ITEMS))
def test_an_answer_is_its_items_one_by_one(front, leaves):
    prepared = front.prepare(RecommendRequest(history=["item-1", "nothing"], n=3))
    scores = -np.arange(len(leaves), dtype=np.float32) / 7
    answer = front.finish(prepared, SearchResult(np.array(leaves, np.int64), scores))
    catalog = front.catalog
    for leaf, score, item in zip(leaves, scores.tolist(), answer.items, strict=True):
        row = int(catalog.trie.rows[leaf])
        assert item == RecommendedItem(
            catalog.item_ids[row], score, front.layout.text(catalog.codes[row]), catalog.names[row]
        )
    assert (answer.score_rule, answer.source, answer.unknown_items) == ("level", "model", ("nothing",))
    cards = front.finish_as_cards(prepared, SearchResult(np.array(leaves, np.int64), scores))
    told = [
        json.loads(b'{"score":0' + bytes(card)) | {"score": score}
        for card, score in zip(cards.items, cards.scores, strict=True)
    ]
    assert told == [item._asdict() for item in answer.items]
    assert (cards.score_rule, cards.source, cards.unknown_items) == ("level", "model", ("nothing",))


def three_of(front):
    prepared = front.prepare(RecommendRequest(history=["item-1"], n=3))
    return front.finish(prepared, SearchResult(np.arange(3), np.zeros(3, np.float32))).items


def test_answers_are_plain_python(front):
    """As JSON needs them, and other processes."""
    for item in three_of(front):
        assert [type(value) for value in (item.item_id, item.score, item.sid, item.name)] == [str, float, str, str]


def test_names_may_be_missing(recommender, front):
    catalog = recommender.catalog
    nameless = type(catalog)(list(catalog.item_ids), catalog.codes, [None] * len(catalog), catalog.counts)
    other = Front(nameless, front.layout, "basket", PromptConfig(), front.facts)
    assert [item.name for item in three_of(other)] == [None] * 3


def test_another_catalog_is_refused(folder, front):
    wrong = EngineFacts("level", 100, 100, NUM_ITEMS + 1, "a device")
    with pytest.raises(AssertionError):
        Front.of_folder(read_folder(folder), wrong)


def test_it_loads_no_torch():
    code = "import sys; import polyrec.engine.front; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("max_prompt_tokens", [5, 40, 1000])
def test_a_sample_is_prepared_and_finished(front, max_prompt_tokens):
    """Whatever the model takes."""
    facts = EngineFacts("level", max_prompt_tokens, 10_000, NUM_ITEMS, "a device")
    other = Front(front.catalog, front.layout, "basket", PromptConfig(max_items=1000, basket_token=False), facts)
    history, n, found = other.sample()
    prepared = other.prepare(RecommendRequest(history=history, n=n))
    assert not prepared.unknown
    assert len(other.finish(prepared, found).items) == n == len(found.leaves)
