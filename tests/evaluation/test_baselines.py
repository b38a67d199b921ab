"""Baselines against dense, loop-by-loop versions of their definitions."""

from __future__ import annotations

from math import log2, sqrt

import numpy as np
import pytest

from polyrec.data.histories import eval_set, known_before
from polyrec.evaluation.baselines import BasketItemKNN, BasketKNNSettings, Popularity, SequenceItemKNN


def ranked_by_hand(scores, seen, k, floor):
    """Best first, ties to the lower item; scores are rounded so that summing in another order still ties."""
    order = sorted(range(len(scores)), key=lambda item: (-np.float32(scores[item]), item))
    kept = [item for item in order if item not in seen and scores[item] > floor][:k]
    return kept + [-1] * (k - len(kept))


def user_events(histories):
    for start, stop in zip(histories.offsets[:-1], histories.offsets[1:], strict=True):
        yield histories.items[start:stop].tolist(), histories.baskets[start:stop].tolist()


def sequence_weights(histories, variant):
    weights = np.zeros((histories.num_items, histories.num_items))
    popularity = np.zeros(histories.num_items)
    for items, _ in user_events(histories):
        for item in items:
            popularity[item] += 1
        for first in range(len(items)):
            for second in range(first + 1, min(first + 6, len(items))):
                gap = second - first
                weights[items[first], items[second]] += 1 / gap
                if variant == "A":
                    weights[items[second], items[first]] += 0.5 / gap
    for source in range(histories.num_items):
        for candidate in range(histories.num_items):
            by = popularity[candidate] + 1 if variant == "A" else max(popularity[source], 1)
            weights[source, candidate] /= sqrt(by)
    return weights


def basket_lists(items, baskets):
    found = {}
    for item, basket in zip(items, baskets, strict=True):
        found.setdefault(basket, []).append(item)
    return [found[basket] for basket in sorted(found)]


@pytest.mark.parametrize("mask_seen", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_popularity(make_histories, seed, mask_seen):
    histories = make_histories(seed, "sequence")
    known, asked = known_before(histories, "test"), eval_set(histories, "test")
    counts = [int((known.items == item).sum()) for item in range(known.num_items)]
    ranked = Popularity().fit(known).rank(asked, 5, mask_seen)
    for row in range(len(asked)):
        seen = set(asked.history(row)[0].tolist()) if mask_seen else set()
        assert ranked[row].tolist() == ranked_by_hand(counts, seen, 5, -1)


@pytest.mark.parametrize("mask_seen", [True, False])
@pytest.mark.parametrize("variant", ["A", "B"])
@pytest.mark.parametrize("seed", range(3))
def test_sequence_item_knn(make_histories, seed, variant, mask_seen):
    histories = make_histories(seed, "sequence", num_users=30, num_items=15)
    known, asked = known_before(histories, "validation"), eval_set(histories, "test")
    weights = sequence_weights(known, variant)
    ranked = SequenceItemKNN(variant).fit(known).rank(asked, 8, mask_seen)
    for row in range(len(asked)):
        items = asked.history(row)[0].tolist()
        scores = sum(weights[item] / (1 + back) for back, item in enumerate(items[::-1][:10]))
        assert ranked[row].tolist() == ranked_by_hand(scores, set(items) if mask_seen else set(), 8, 0)


@pytest.mark.parametrize("mask_seen", [True, False])
@pytest.mark.parametrize("repeat", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_basket_item_knn(make_histories, seed, repeat, mask_seen):
    histories = make_histories(seed, "basket")
    known, asked = known_before(histories, "test"), eval_set(histories, "test")
    num_items = known.num_items
    weights, popularity = np.zeros((num_items, num_items)), np.zeros(num_items)
    buyers, purchases = np.zeros(num_items), np.zeros(num_items)
    for items, baskets in user_events(known):
        for item in items:
            purchases[item] += 1
        for item in set(items):
            buyers[item] += 1
        for basket in basket_lists(items, baskets):
            for one in basket:
                popularity[one] += 1
                for other in basket:
                    weights[one, other] += (one != other) / log2(1 + len(basket))
    weights /= np.sqrt(np.outer(popularity + 2, popularity + 2))
    rebuy = (purchases - buyers + 2) / (buyers + 4)
    ranked = BasketItemKNN(BasketKNNSettings(repeat=repeat)).fit(known).rank(asked, 6, mask_seen)
    for row in range(len(asked)):
        items, baskets = (part.tolist() for part in asked.history(row))
        scores = np.zeros(num_items)
        for age, basket in enumerate(reversed(basket_lists(items, baskets))):
            for item in basket:
                scores += 0.8**age / sqrt(len(basket)) * weights[item]
                scores[item] += repeat * 0.9**age * sqrt(rebuy[item])
        assert ranked[row].tolist() == ranked_by_hand(scores, set(items) if mask_seen else set(), 6, 0)
