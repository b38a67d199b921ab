"""The recommender's answers against transformers on whole sequences, and the meaning of every option of a request."""

from __future__ import annotations

import asyncio
import copy
import re

import numpy as np
import pytest
import torch
import transformers
from reference import beam_search

from polyrec.core.errors import CheckpointError, RequestError
from polyrec.core.request import RecommendRequest
from polyrec.data.histories import EvalSet
from polyrec.data.prompt import PromptConfig
from polyrec.engine.engine import EngineConfig
from polyrec.engine.folder import read_folder
from polyrec.engine.recommender import Recommender
from polyrec.engine.scheduler import BatchLimits
from polyrec.kvcache.options import KVConfig
from polyrec.testing.tiny import write_tiny_model

NUM_ITEMS = 120
HISTORY = ["item-3", ["item-50", "item-7"], "item-119", ["item-4"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(
        tmp_path_factory.mktemp("recommender") / "tiny", num_items=NUM_ITEMS, codebook_sizes=(6, 9, 8)
    )


@pytest.fixture(scope="module")
def recommender(folder):
    """Answers are compared to the bit here, so nothing is reused: rounding depends on how much of a prompt is cached."""
    return Recommender.from_pretrained(folder, config=EngineConfig(kv=KVConfig(prefix_cache=False)))


@pytest.fixture(scope="module")
def reference(folder, recommender):
    """(history) -> float64 [NUM_ITEMS]: each item's score by transformers alone, no cache, no trie, no prompt builder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    letters = "abc"
    levels = [[token for text, token in vocabulary.items() if re.match(f"<s_{letter}_", text)] for letter in letters]
    codes = recommender.catalog.codes
    sids = ["".join(f"<s_{a}_{code}>" for a, code in zip(letters, row, strict=True)) for row in codes]

    def scores(history):
        baskets = [[entry] if isinstance(entry, str) else entry for entry in history]
        past = "".join("<|sid_begin|>" + "".join(sids[int(item[5:])] for item in basket) for basket in baskets)
        ids = torch.tensor([tokenizer(past + "<|sid_begin|>" + sid)["input_ids"] for sid in sids])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[:, -3:]
        total = torch.zeros(len(sids), dtype=torch.float64)
        for level, tokens in enumerate(levels):
            own = logits[:, level].gather(1, ids[:, level - 3, None])[:, 0]
            total += own - logits[:, level, tokens].logsumexp(-1)
        return total.numpy()

    return scores


@pytest.mark.parametrize("history", [["item-9"], HISTORY, [["item-1", "item-2", "item-3"]], ["item-8", "item-8"]])
def test_scores_and_order_are_transformers(recommender, reference, history):
    expected = reference(history)
    answer = recommender.recommend(history, n=NUM_ITEMS)
    assert (answer.source, answer.score_rule, answer.unknown_items) == ("model", "level", ())
    rows = [int(item_id[5:]) for item_id in answer.item_ids]
    assert sorted(rows) == list(range(NUM_ITEMS))
    np.testing.assert_allclose([item.score for item in answer.items], expected[rows], atol=2e-4)
    assert (np.diff([item.score for item in answer.items]) <= 0).all()
    best = recommender.recommend(history, n=5, beam_width=NUM_ITEMS).item_ids
    assert best == [f"item-{row}" for row in np.argsort(-expected)[:5]]


def test_items_carry_name_and_sid(recommender):
    for item in recommender.recommend(HISTORY, n=7).items:
        row = int(item.item_id[5:])
        assert item.name == f"Item number {row}"
        assert item.sid == "".join(
            f"<s_{a}_{code}>" for a, code in zip("abc", recommender.catalog.codes[row], strict=True)
        )


def test_sids_may_stand_for_ids(recommender):
    def sid(row):
        return recommender.layout.text(recommender.catalog.codes[row])

    by_sid = [sid(3), [sid(50), "item-7"], f"<|sid_begin|>{sid(119)}<|sid_end|>", [sid(4)]]
    assert recommender.recommend(by_sid) == recommender.recommend(HISTORY)


def test_baskets_matter_to_a_basket_model(recommender, reference):
    together, apart = [["item-50", "item-7"]], ["item-50", "item-7"]
    assert not np.allclose(reference(together), reference(apart), atol=1e-3)
    assert recommender.recommend(together).items != recommender.recommend(apart).items


def test_a_sequence_model_takes_each_item_alone(folder, tmp_path):
    import json
    import shutil

    flat = shutil.copytree(folder, tmp_path / "flat")
    facts = json.loads((flat / "polyrec.json").read_text(encoding="utf-8"))
    (flat / "polyrec.json").write_text(json.dumps({**facts, "kind": "sequence"}), encoding="utf-8")
    sequence = Recommender.from_pretrained(flat)
    assert sequence.recommend([["item-50", "item-7"]]) == sequence.recommend(["item-50", "item-7"])


def test_only_the_newest_items_of_a_long_history_count(recommender):
    longest = PromptConfig().max_items
    rng = np.random.default_rng(0)
    history = [f"item-{row}" for row in rng.integers(0, NUM_ITEMS, longest + 30)]
    assert recommender.recommend(history) == recommender.recommend(history[-longest:])
    assert recommender.recommend(history) != recommender.recommend(history[-longest + 1 :])


def test_excluded_items_leave_and_the_rest_keeps_its_order(recommender):
    everything = recommender.recommend(HISTORY, n=NUM_ITEMS).item_ids
    gone = everything[1:60:3]
    left = [item for item in everything if item not in gone]
    assert recommender.recommend(HISTORY, n=NUM_ITEMS, exclude=gone).item_ids == left
    assert recommender.recommend(HISTORY, n=4, beam_width=NUM_ITEMS, exclude=[*gone, "nowhere"]).item_ids == left[:4]


def test_seen_items_leave_only_when_asked(recommender):
    seen = {"item-3", "item-50", "item-7", "item-119", "item-4"}
    assert seen <= set(recommender.recommend(HISTORY, n=NUM_ITEMS).item_ids)
    fresh = recommender.recommend(HISTORY, n=NUM_ITEMS, exclude_seen=True).item_ids
    assert set(fresh) == {f"item-{row}" for row in range(NUM_ITEMS)} - seen


def test_only_allowed_items_come_back(recommender):
    everything = recommender.recommend(HISTORY, n=NUM_ITEMS).item_ids
    allow = [f"item-{row}" for row in range(40)]
    expected = [item for item in everything if item in set(allow)]
    assert recommender.recommend(HISTORY, n=NUM_ITEMS, allow=[*allow, "nowhere"]).item_ids == expected
    both = recommender.recommend(HISTORY, n=NUM_ITEMS, allow=allow, exclude=["item-5"], exclude_seen=True).item_ids
    assert both == [item for item in expected if item not in {"item-5", "item-3", "item-7", "item-4"}]
    assert recommender.recommend(HISTORY, allow=[]).items == ()
    assert recommender.recommend(HISTORY, allow=["item-5"], exclude=["item-5"]).items == ()


def test_more_than_the_catalog_holds(recommender):
    everything = recommender.recommend(HISTORY, n=NUM_ITEMS)
    assert recommender.recommend(HISTORY, n=10**9) == everything  # and no memory for a billion prefixes
    assert recommender.recommend(HISTORY, n=3, beam_width=10**9).items == everything.items[:3]
    assert len(recommender.recommend(["nowhere"], n=10**9).items) == NUM_ITEMS


def test_unknown_history_items_are_dropped_and_told(recommender):
    with_strangers = ["gone", *HISTORY[:2], ["item-119", "<s_a_99><s_b_0><s_c_0>"], *HISTORY[3:]]
    answer = recommender.recommend(with_strangers)
    assert answer.unknown_items == ("gone", "<s_a_99><s_b_0><s_c_0>")
    assert answer.items == recommender.recommend(HISTORY).items
    with pytest.raises(RequestError) as caught:
        recommender.recommend(with_strangers, unknown="error")
    assert caught.value.code == "unknown_items"


@pytest.mark.parametrize(("field", "unknown"), [("exclude", "error"), ("allow", "error"), ("allow", "drop")])
def test_unknown_filter_items_are_refused(recommender, field, unknown):
    """Under `drop`, only when no allowed item is left: that is never meant."""
    with pytest.raises(RequestError, match=f"in '{field}'") as caught:
        recommender.recommend(HISTORY, unknown=unknown, **{field: ["nowhere"]})
    assert caught.value.code == "unknown_items"


def test_sids_may_stand_for_ids_in_filters(recommender):
    best = recommender.recommend(HISTORY, n=4)
    sids = [item.sid for item in best.items]
    for exclude, allow in [(sids[:2], None), ((), sids), (sids[1:2], sids[:3])]:
        by_id = [[best.item_ids[sids.index(sid)] for sid in given or ()] for given in (exclude, allow)]
        expected = recommender.recommend(HISTORY, n=4, exclude=by_id[0], allow=None if allow is None else by_id[1])
        assert recommender.recommend(HISTORY, n=4, exclude=exclude, allow=allow) == expected


@pytest.mark.parametrize("field", ["exclude", "allow"])
@pytest.mark.parametrize(("value", "code"), [("item-3", "list_expected"), (3, "list_expected"), ([3], "item_type")])
def test_filters_of_other_things_are_refused(recommender, field, value, code):
    with pytest.raises(RequestError, match=field) as caught:
        recommender.recommend(HISTORY, **{field: value})
    assert caught.value.code == code


@pytest.mark.parametrize("history", [[], [[]], ["nowhere", ["nothing"]]])
def test_a_cold_history_gets_popularity(recommender, history):
    counts = recommender.catalog.counts
    order = sorted(range(NUM_ITEMS), key=lambda row: (-counts[row], row))
    answer = recommender.recommend(history, n=6)
    assert answer.source == "popularity"
    assert answer.item_ids == [f"item-{row}" for row in order[:6]]
    assert [item.score for item in answer.items] == [counts[row] for row in order[:6]]
    filtered = recommender.recommend(history, n=2, exclude=[f"item-{order[1]}"], allow=[f"item-{r}" for r in order[:4]])
    assert filtered.item_ids == [f"item-{order[0]}", f"item-{order[2]}"]
    with pytest.raises(RequestError) as caught:
        recommender.recommend(history, cold="error")
    assert caught.value.code == "cold_history"


@pytest.mark.parametrize("options", [{"n": 0}, {"n": 5, "beam_width": 4}])
def test_counts_out_of_range(recommender, options):
    with pytest.raises(RequestError):
        recommender.recommend(HISTORY, **options)


def random_requests(count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        history = [[f"item-{row}" for row in rng.integers(0, NUM_ITEMS, size)] for size in rng.integers(0, 4, 8)]
        n = int(rng.integers(1, 20))
        yield RecommendRequest(
            history=history[: int(rng.integers(0, 9))],
            n=n,
            beam_width=n + int(rng.integers(0, 9)),
            exclude_seen=bool(rng.integers(2)),
            allow=[f"item-{row}" for row in range(60)] if rng.integers(3) == 0 else None,
        )


def test_a_batch_equals_single_requests(folder, recommender):
    requests = list(random_requests(40))
    progress = []
    small = Recommender.from_pretrained(folder, config=EngineConfig(limits=BatchLimits(max_requests=7)))
    together = small.recommend_batch(requests, progress.append)
    assert sum(progress) == sum(answer.source == "model" for answer in together)
    assert max(progress) <= 7
    for request, answer in zip(requests, together, strict=True):
        alone = recommender.recommend_batch([request])[0]
        assert answer.item_ids == alone.item_ids
        assert answer.source == alone.source
        np.testing.assert_allclose(
            [item.score for item in answer.items], [item.score for item in alone.items], atol=1e-4
        )


def test_code_spaces_too_large_to_search_have_no_invalid_rate(folder, recommender, monkeypatch):
    """As the codebooks of large catalogs make them; whatever else `polyrec evaluate` measures does not depend on it."""
    rows = np.array([3], np.int32)
    asked = EvalSet(np.arange(1), np.arange(2), rows, rows * 0, np.arange(2), rows, NUM_ITEMS, "basket")
    sizes = recommender.layout.codebook_sizes
    for limit, measured in [(np.prod(sizes), True), (np.prod(sizes) - 1, False)]:
        monkeypatch.setattr("polyrec.engine.recommender.MAX_COMPLETE_LEAVES", limit)
        assert (recommender.unconstrained_invalid_rate(asked, 2) is not None) == measured


def test_async_callers_get_their_own_answers(recommender):
    requests = list(random_requests(12, seed=1))

    async def ask():
        return await asyncio.gather(*(recommender.recommend_async(request) for request in requests))

    assert asyncio.run(ask()) == [recommender.recommend_batch([request])[0] for request in requests]


def test_histories_longer_than_the_positions_are_refused_at_loading(folder, recommender):
    """Where the longest prompt just fits and where it lacks one."""
    contents, model = read_folder(folder), copy.deepcopy(recommender._model)
    longest = recommender.front.prompts.max_tokens
    for positions, fits in [(longest + 3, True), (longest + 2, False)]:
        model.config = model.config.model_copy(update={"max_position_embeddings": positions})
        if fits:
            Recommender(model, contents, recommender._backend)
            continue
        with pytest.raises(CheckpointError, match=f"{longest} tokens") as caught:
            Recommender(model, contents, recommender._backend)
        assert caught.value.code == "positions_too_few"


def test_ready_prompts(recommender):
    begin = recommender.layout.begin
    for tokens, code in [([], "prompt_end"), ([0, 1], "prompt_end"), ([10**6, begin], "prompt_token")]:
        with pytest.raises(RequestError) as caught:
            recommender.prepare_prompt(tokens, 3)
        assert caught.value.code == code
    with pytest.raises(RequestError) as caught:
        recommender.prepare_prompt([begin] * (recommender.max_prompt_tokens + 1), 3)
    assert caught.value.code == "prompt_too_long"
    rows = np.array([3, 50])
    prepared = recommender.prepare_prompt(recommender.prompt_of(rows, np.array([0, 1])).tolist(), 5)
    assert recommender.answer([prepared])[0].items == recommender.recommend(["item-3", "item-50"], n=5).items


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kept", ["changed", "backwards", "read only"])
def test_a_ready_prompt_may_be_any_array_and_is_its_caller_s_again(recommender, kept):
    expected = recommender.recommend(["item-3", "item-50"], n=5).items
    tokens = recommender.prompt_of(np.array([3, 50]), np.array([0, 1]))
    if kept == "backwards":
        tokens = tokens[::-1].copy()[::-1]
    tokens.flags.writeable = kept != "read only"
    prepared = recommender.prepare_prompt(tokens, 5)
    if kept == "changed":
        tokens[:] = recommender.layout.begin
    assert recommender.answer([prepared])[0].items == expected


def test_unconstrained_beams_count_sids_of_no_item(recommender):
    """Against a plain beam search over every code sequence, whether or not an item has it."""
    rng, width, k, users = np.random.default_rng(4), 9, 6, 5
    items = rng.integers(0, NUM_ITEMS, 4 * users).astype(np.int32)
    offsets, nothing = np.arange(0, len(items) + 1, 4), np.zeros(0, np.int32)
    baskets = np.tile(np.array([0, 0, 1, 2], np.int32), users)
    asked = EvalSet(
        np.arange(users), offsets, items, baskets, np.zeros(users + 1, np.int64), nothing, NUM_ITEMS, "basket"
    )
    known = set(map(tuple, recommender.catalog.codes.tolist()))
    every = set(np.ndindex(*recommender.layout.codebook_sizes))
    model = copy.deepcopy(recommender._model).double()
    invalid = []
    for row in range(users):
        prompt = recommender.prompt_of(*asked.history(row)).tolist()
        invalid += [
            sid not in known for sid, _ in beam_search(model, recommender.layout, prompt, every, width, "level")[:k]
        ]
    assert 0 < sum(invalid) < len(invalid)
    assert recommender.unconstrained_invalid_rate(asked, k, width) == pytest.approx(np.mean(invalid))
