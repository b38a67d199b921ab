"""Which examples a step sees: decoded back from the packed tokens and compared with the histories they came from."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from polyrec.core.errors import TrainingError
from polyrec.data.histories import FIT, TEST, VALIDATION, Histories, known_before
from polyrec.data.loader import ExampleLoader, SamplingConfig
from polyrec.data.prompt import PromptBuilder, PromptConfig
from polyrec.sid.layout import SidLayout

LAYOUT = SidLayout.contiguous((8, 8, 16), 2)
PLAIN = {
    "complete_baskets": 0.0,
    "shuffle_baskets": False,
    "max_targets": 100,
    "batch_size": 4,
    "prompt_weight": 0.0,
    "drop_items": 0.0,
}


def make_histories(users, kind="basket", splits=None):
    """users: per user a list of baskets (lists of items). splits: the same shape, a label per basket."""
    baskets = [
        [(item, n, splits[u][n] if splits else FIT) for n, basket in enumerate(user) for item in basket]
        for u, user in enumerate(users)
    ]
    events = np.array([event for user in baskets for event in user]).reshape(-1, 3)
    return Histories(
        users=[str(u) for u in range(len(users))],
        offsets=np.cumsum([0, *map(len, baskets)]).astype(np.int64),
        items=events[:, 0].astype(np.int32),
        baskets=events[:, 1].astype(np.int32),
        split=events[:, 2].astype(np.int8),
        num_items=1024,
        kind=kind,
    )


def unique_users(rng, num=9, sizes=(1, 5), counts=(1, 6)):
    """Baskets in which no item is ever repeated, so that an item tells its user and basket."""
    numbers = iter(rng.permutation(1024).tolist())
    return [
        [[next(numbers) for _ in range(int(rng.integers(*sizes)))] for _ in range(int(rng.integers(*counts)))]
        for _ in range(num)
    ]


def codes_of(items):
    return np.stack(np.unravel_index(items, LAYOUT.codebook_sizes), axis=-1)


def make_loader(histories, seed=0, max_items=200, **sampling):
    prompts = PromptBuilder(LAYOUT, PromptConfig(max_items=max_items))
    codes = codes_of(np.arange(histories.num_items)).astype(np.int32)
    return ExampleLoader(histories, codes, prompts, SamplingConfig(**{**PLAIN, **sampling}), seed)


def decode(batch):
    """Each example as (history baskets, targets, weights of the targets). Needs prompt_weight = 0."""
    examples, start = [], 0
    owner = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    for row, length in enumerate(batch.lengths.tolist()):
        tokens = batch.token_ids[start : start + length][batch.branch[start : start + length] == 0].tolist()
        baskets, place = [], 0
        while place < len(tokens) - 1:
            if tokens[place] == LAYOUT.begin:
                baskets.append([])
                place += 1
            baskets[-1].append(item_of(tokens[place : place + 3]))
            place += 3
        chosen = [owner[labels.index] == row for labels in batch.labels]
        targets = np.stack([labels.code[mine] for labels, mine in zip(batch.labels, chosen, strict=True)], axis=1)
        weights = batch.labels[0].weight[chosen[0]].tolist()
        examples.append((baskets, np.ravel_multi_index(targets.T, LAYOUT.codebook_sizes).tolist(), weights))
        start += length
    return examples


def item_of(tokens):
    codes = [token - start for token, start in zip(tokens, LAYOUT.level_starts, strict=True)]
    return int(np.ravel_multi_index(codes, LAYOUT.codebook_sizes))


def epoch(loader, number=0):
    first = number * loader.steps_per_epoch
    return [example for step in range(loader.steps_per_epoch) for example in decode(loader.batch(first + step))]


def key(example):
    """An example without the order inside its baskets."""
    history, targets, _ = example
    return tuple(tuple(sorted(basket)) for basket in history), tuple(sorted(targets))


def expected_examples(users):
    return Counter(
        (tuple(tuple(sorted(basket)) for basket in user[:n]), tuple(sorted(user[n])))
        for user in users
        for n in range(1, len(user))
    )


def test_a_step_follows_from_seed_and_number_alone():
    histories = make_histories(unique_users(np.random.default_rng(0)))
    options = {"complete_baskets": 0.5, "shuffle_baskets": True, "prompt_weight": 1.0}
    one, other = make_loader(histories, **options), make_loader(histories, **options)
    in_order = [one.batch(step) for step in range(12)]
    for step in (7, 0, 11, 7):
        batch = other.batch(step)
        for name in ("token_ids", "positions", "branch", "lengths"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(in_order[step], name))
        for labels, expected in zip(batch.labels, in_order[step].labels, strict=True):
            for found, wanted in zip(vars(labels).values(), vars(expected).values(), strict=True):
                np.testing.assert_array_equal(found, wanted)
    elsewhere = make_loader(histories, seed=1, **options)
    assert any(not np.array_equal(elsewhere.batch(step).token_ids, in_order[step].token_ids) for step in range(3))


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_visits_each_basket_with_a_history_once(shuffle):
    users = unique_users(np.random.default_rng(1))
    loader = make_loader(make_histories(users), shuffle_baskets=shuffle)
    expected = expected_examples(users)
    assert loader.examples_per_epoch == sum(expected.values())
    orders = [epoch(loader, number) for number in range(3)]
    for examples in orders:
        assert Counter(map(key, examples)) == expected
    assert [key(e) for e in orders[0]] != [key(e) for e in orders[1]], "each epoch has its own order"


def test_order_inside_baskets_is_drawn_anew_and_order_of_baskets_is_kept():
    users = [[[1, 2, 3], [4], [5, 6, 7]]]
    drawn = [epoch(make_loader(make_histories(users), shuffle_baskets=True), n) for n in range(60)]
    examples = [example for run in drawn for example in run]
    assert {key(example) for example in examples} == set(expected_examples(users))
    assert len({tuple(history[0]) for history, _, _ in examples}) == 6
    assert len({tuple(targets) for _, targets, _ in examples if len(targets) == 3}) == 6
    stored = [epoch(make_loader(make_histories(users)), n) for n in range(5)]
    assert all(history == users[0][: len(history)] for run in stored for history, _, _ in run)


def test_completion_moves_a_part_of_the_target_basket_into_the_prompt():
    users = unique_users(np.random.default_rng(2))
    whole = {basket[0]: basket for user in users for basket in user}
    by_item = {item: tuple(basket) for basket in whole.values() for item in basket}
    loader = make_loader(make_histories(users), complete_baskets=1.0, shuffle_baskets=True)
    sizes = set()
    for number in range(20):
        for history, targets, _ in epoch(loader, number):
            basket = by_item[targets[0]]
            seen = [item for part in history for item in part]
            assert not set(seen) & set(targets)
            if len(basket) == 1:
                assert by_item[seen[-1]] != basket
            else:
                given = history[-1]
                assert sorted([*given, *targets]) == sorted(basket), "the given part is a basket of its own, at the end"
                sizes.add((len(basket), len(given)))
    assert sizes == {(size, given) for size in (2, 3, 4) for given in range(1, size)}


def test_completion_happens_as_often_as_asked():
    users = [[[1], [2, 3, 4]] for _ in range(50)]
    loader = make_loader(make_histories(users), complete_baskets=0.25)
    examples = [example for number in range(20) for example in epoch(loader, number)]
    share = np.mean([len(targets) < 3 for _, targets, _ in examples])
    assert abs(share - 0.25) < 0.05  # 1,000 draws: over three standard deviations


@pytest.mark.parametrize("complete", [0.0, 0.5, 1.0])
def test_no_target_stands_in_its_own_prompt(complete):
    """Items never repeat here, so a target in its prompt could only be a leak."""
    users = unique_users(np.random.default_rng(3))
    loader = make_loader(make_histories(users), complete_baskets=complete, shuffle_baskets=True, first_baskets=True)
    later = {item: (u, n) for u, user in enumerate(users) for n, basket in enumerate(user) for item in basket}
    for number in range(5):
        for history, targets, _ in epoch(loader, number):
            seen = {item for basket in history for item in basket}
            assert not seen & set(targets)
            user, basket = later[targets[0]]
            assert {later[item] for item in targets} == {(user, basket)}
            assert all(later[item][0] == user and later[item][1] <= basket for item in seen), "the past of this user"
            if complete == 0.0 and basket > 0:
                assert all(later[item][1] < basket for item in seen)


def test_first_baskets_complete_themselves():
    users = [[[1, 2, 3]], [[4], [5]], [[6, 7], [8]], [[9]]]
    assert make_loader(make_histories(users)).examples_per_epoch == 2
    loader = make_loader(make_histories(users), first_baskets=True)
    assert loader.examples_per_epoch == 4
    firsts = set()
    for number in range(20):
        examples = epoch(loader, number)
        assert len(examples) == 4
        for history, targets, _ in examples:
            assert history
            if len(history) == 1 and {*history[0], *targets} in ({1, 2, 3}, {6, 7}):
                firsts.add((*history[0], 0, *targets))
    assert firsts == {(1, 0, 2, 3), (1, 2, 0, 3), (6, 0, 7)}
    with pytest.raises(TrainingError) as error:
        make_loader(make_histories([[[1, 2]], [[3]]]))
    assert error.value.code == "nothing_to_train_on"


@pytest.mark.parametrize("repeat_weight", [0.0, 0.5, 1.0])
def test_repeats_weigh_what_is_asked(repeat_weight):
    users = [[[1, 2], [2, 3], [1, 4, 3]], [[5], [5]]]
    loader = make_loader(make_histories(users), repeat_weight=repeat_weight)
    for history, targets, weights in epoch(loader):
        seen = {item for basket in history for item in basket}
        assert weights == [repeat_weight if item in seen else 1.0 for item in targets]


def test_max_targets_takes_a_random_part():
    users = [[[1], [2, 3, 4, 5]]]
    loader = make_loader(make_histories(users), max_targets=2, shuffle_baskets=True)
    chosen = [tuple(sorted(targets)) for number in range(60) for _, targets, _ in epoch(loader, number)]
    assert set(map(len, chosen)) == {2}
    assert len(set(chosen)) == 6


def test_the_newest_items_stay_when_a_history_is_long():
    users = [[[n] for n in range(30)]]
    loader = make_loader(make_histories(users), max_items=5)
    for history, targets, _ in epoch(loader):
        assert [item for basket in history for item in basket] == list(range(max(0, targets[0] - 5), targets[0]))


def test_sequences_are_one_example_a_user_with_all_events_labelled():
    users = [[[n] for n in row] for row in ([1, 2, 3, 4], [5, 6], [7], [8, 9, 10])]
    histories = make_histories(users, kind="sequence")
    loader = make_loader(histories)
    assert Counter(map(key, epoch(loader))) == Counter(
        (tuple((basket[0],) for basket in user[:-1]), tuple(user[-1])) for user in users if len(user) > 1
    )
    labelled = make_loader(histories, prompt_weight=1.0, batch_size=10).batch(0)
    # Every event of the three users that have two or more: the target, and by the basket token all before it.
    assert [len(labels.index) for labels in labelled.labels] == [4 + 2 + 3] * 3


@pytest.mark.parametrize("kind", ["basket", "sequence"])
@pytest.mark.parametrize("stage", ["validation", "test"])
def test_no_event_of_a_later_split_is_ever_seen(kind, stage):
    rng = np.random.default_rng(4)
    users = unique_users(rng, sizes=(1, 5) if kind == "basket" else (1, 2), counts=(1, 8))
    splits = [[FIT] * (len(user) - 2) + [VALIDATION, TEST] if len(user) > 2 else [FIT] * len(user) for user in users]
    histories = make_histories(users, kind, splits)
    loader = make_loader(known_before(histories, stage), complete_baskets=0.5, shuffle_baskets=True, first_baskets=True)
    allowed = {FIT} if stage == "validation" else {FIT, VALIDATION}
    label = {i: splits[u][n] for u, user in enumerate(users) for n, basket in enumerate(user) for i in basket}
    seen = {
        item
        for number in range(4)
        for history, targets, _ in epoch(loader, number)
        for item in [*targets, *(item for basket in history for item in basket)]
    }
    assert {label[item] for item in seen} == allowed


def test_history_items_are_left_out_anew_each_time_but_never_the_newest_nor_a_target():
    users = [[[8 * u + n] for n in range(8)] for u in range(9)]
    loader = make_loader(make_histories(users, "sequence"), drop_items=0.4)
    kept_shares, seen = [], set()
    for number in range(40):
        for history, targets, _ in epoch(loader, number):
            whole = users[targets[0] // 8][:-1]
            assert targets == users[targets[0] // 8][-1]
            assert history[-1] == whole[-1]
            assert history == [item for item in whole if item in history]  # order stays
            kept_shares.append((len(history) - 1) / (len(whole) - 1))
            seen.add(str(history))
    assert np.mean(kept_shares) == pytest.approx(0.6, abs=0.04)
    assert len(seen) > 200


@pytest.mark.parametrize(("kind", "lost"), [("sequence", True), ("basket", False)])
def test_by_default_only_data_without_baskets_loses_items(kind, lost):
    users = [[[8 * u + n] for n in range(8)] for u in range(9)]
    loader = make_loader(make_histories(users, kind), drop_items=None)
    lengths = [len(history) - targets[0] % 8 for number in range(5) for history, targets, _ in epoch(loader, number)]
    assert (min(lengths) < 0) == lost


def test_an_item_that_was_left_out_of_the_prompt_still_counts_as_a_repeat():
    users = [[[1], [2], [3], [4], [1]]]
    loader = make_loader(make_histories(users), drop_items=0.5, repeat_weight=0.25)
    found = [
        (1 in [item for basket in history for item in basket], weights)
        for number in range(40)
        for history, targets, weights in epoch(loader, number)
        if targets == [1]
    ]
    assert {seen for seen, _ in found} == {True, False}
    assert all(weights == [0.25] for _, weights in found)
