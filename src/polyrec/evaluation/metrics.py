"""Ranking metrics per user, over a whole table of rankings, and their bootstrap intervals. Numpy only.

A ranking is int [N, K] catalog rows, best first, −1 where nothing was recommended. An item recommended twice counts
once, at its first place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..data.histories import EvalSet


class Interval(NamedTuple):
    """A mean with the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def per_user_metrics(ranked: np.ndarray, eval_set: EvalSet, ks: tuple[int, ...]) -> dict[str, np.ndarray]:
    """`HR@k`, `Recall@k`, `NDCG@k`, `MRR@k` -> float64 [N], for each k of `ks` (at most K, the columns of `ranked`).

    HR: any hit. Recall: hits / targets. NDCG: gain 1 / log2(place + 1), ideal over min(k, targets). MRR: 1 / place of
    the first hit.
    """
    assert len(ranked) == len(eval_set), (ranked.shape, len(eval_set))
    assert ranked.shape[1] >= max(ks), (ranked.shape, ks)
    hits = hit_places(ranked, eval_set)
    num_targets = np.diff(eval_set.target_offsets)
    place = np.arange(1, ranked.shape[1] + 1)
    discount = 1 / np.log2(place + 1)
    ideal = np.concatenate([[0.0], np.cumsum(discount)])
    values: dict[str, np.ndarray] = {}
    for k in ks:
        cut: np.ndarray = hits[:, :k]
        values[f"HR@{k}"] = np.asarray(cut.any(axis=1), np.float64)
        values[f"Recall@{k}"] = np.asarray(cut.sum(axis=1) / num_targets)
        values[f"NDCG@{k}"] = np.asarray((cut * discount[:k]).sum(axis=1) / ideal[np.minimum(k, num_targets)])
        values[f"MRR@{k}"] = (cut / place[:k]).max(axis=1)
    return values


def hit_places(ranked: np.ndarray, eval_set: EvalSet) -> np.ndarray:
    """bool [N, K]: whether the item at this place is a target not already recommended above."""
    owner = np.repeat(np.arange(len(eval_set), dtype=np.int64), np.diff(eval_set.target_offsets))
    targets = owner * eval_set.num_items + eval_set.targets
    asked = np.arange(len(eval_set), dtype=np.int64)[:, None] * eval_set.num_items + ranked
    return np.isin(asked, targets) & (ranked >= 0) & ~repeated(ranked)


def repeated(ranked: np.ndarray) -> np.ndarray:
    """bool [N, K]: whether the same item stands further up in its row; empty places never count."""
    order = np.argsort(ranked, axis=1, kind="stable")
    in_order = np.take_along_axis(ranked, order, axis=1)
    again = np.zeros(ranked.shape, bool)
    again[:, 1:] = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
    found = np.zeros(ranked.shape, bool)
    np.put_along_axis(found, order, again, axis=1)
    return found


def item_coverage(ranked: np.ndarray, num_items: int, k: int) -> float:
    """Share of the catalog that is recommended to anybody within the first k places of ranked int [N, K]."""
    shown = ranked[:, :k]
    return len(np.unique(shown[shown >= 0])) / num_items


def novelty(ranked: np.ndarray, counts: np.ndarray, k: int) -> float:
    """Mean −log2 of the recommended items' share of all events, in bits; an item without events counts as with one.

    counts: int [num_items], events known before the stage.
    """
    shown = ranked[:, :k]
    shown = shown[shown >= 0]
    if not len(shown):
        return 0.0
    return float(-np.log2(np.maximum(counts[shown], 1) / max(counts.sum(), 1)).mean())


def invalid_rate(ranked: np.ndarray, k: int) -> float:
    """Share of the first k places of ranked int [N, K] that name no item of the catalog (−1)."""
    return float((ranked[:, :k] < 0).mean()) if len(ranked) else 0.0


def duplicate_rate(ranked: np.ndarray, k: int) -> float:
    """Share of the first k places of ranked int [N, K] that repeat an item from further up."""
    return float(repeated(ranked[:, :k]).mean()) if len(ranked) else 0.0


def bootstrap_means(values: np.ndarray, samples: int = 1000, seed: int = 0) -> np.ndarray:
    """Means over users drawn again with replacement: float64 [N, M] -> [samples, M].

    All columns see the same draws, so differences of columns are paired; the same seed and N give the same draws.
    """
    num_users = len(values)
    generator = np.random.default_rng(seed)
    means = np.empty((samples, values.shape[1]))
    block = max(1, min(samples, 2_000_000 // max(num_users, 1)))
    for start in range(0, samples, block):
        size = min(block, samples - start)
        drawn = generator.integers(0, num_users, (size, num_users)) + np.arange(size)[:, None] * num_users
        times = np.bincount(drawn.ravel(), minlength=size * num_users).reshape(size, num_users)
        means[start : start + size] = times.astype(np.float64) @ values / num_users
    return means


def bootstrap_intervals(values: np.ndarray, samples: int = 1000, seed: int = 0, level: float = 0.95) -> list[Interval]:
    """The mean of each column of float64 [N, M] with its percentile interval over users."""
    tails = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(bootstrap_means(values, samples, seed), tails, axis=0)
    return [Interval(*map(float, ends)) for ends in zip(values.mean(axis=0), low, high, strict=True)]
