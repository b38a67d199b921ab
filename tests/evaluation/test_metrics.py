"""Metrics against plain loops and scikit-learn; intervals against the central limit theorem."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from polyrec.data.histories import eval_set
from polyrec.evaluation import metrics


@pytest.fixture
def case(make_histories):
    """Rankings with holes and repeats, and what was asked."""
    asked = eval_set(make_histories(2, "basket", num_users=60), "test")
    ranked = np.random.default_rng(3).integers(-1, asked.num_items, (len(asked), 7)).astype(np.int32)
    return ranked, asked


def test_per_user_metrics_against_loops(case):
    ranked, asked = case
    values = metrics.per_user_metrics(ranked, asked, (3, 7))
    for row in range(len(asked)):
        targets = set(asked.target(row).tolist())
        for k in (3, 7):
            met, places = set(), []
            for place, item in enumerate(ranked[row, :k].tolist(), start=1):
                if item in targets and item not in met:
                    met.add(item)
                    places.append(place)
            ideal = sum(1 / log2(place + 1) for place in range(1, min(k, len(targets)) + 1))
            expected = {
                "HR": float(bool(places)),
                "Recall": len(places) / len(targets),
                "NDCG": sum(1 / log2(place + 1) for place in places) / ideal,
                "MRR": 1 / places[0] if places else 0.0,
            }
            for name, value in expected.items():
                assert values[f"{name}@{k}"][row] == pytest.approx(value)


def test_ndcg_against_sklearn(make_histories):
    asked = eval_set(make_histories(4, "basket"), "test")
    rng = np.random.default_rng(5)
    ranked = np.stack([rng.permutation(asked.num_items) for _ in range(len(asked))])
    ours = metrics.per_user_metrics(ranked, asked, (5,))["NDCG@5"]
    relevance, scores = np.zeros((2, len(asked), asked.num_items))
    for row in range(len(asked)):
        relevance[row, asked.target(row)] = 1
        scores[row, ranked[row]] = -np.arange(asked.num_items)
    assert ours.mean() == pytest.approx(ndcg_score(relevance, scores, k=5))


def test_rates(case):
    ranked, asked = case
    k = 5
    shown = [[item for item in row if item >= 0] for row in ranked[:, :k].tolist()]
    flat = [item for row in shown for item in row]
    assert metrics.item_coverage(ranked, asked.num_items, k) == len(set(flat)) / asked.num_items
    assert metrics.invalid_rate(ranked, k) == pytest.approx(1 - len(flat) / (len(ranked) * k))
    again = sum(len(row) - len(set(row)) for row in shown)
    assert metrics.duplicate_rate(ranked, k) == pytest.approx(again / (len(ranked) * k))
    counts = np.arange(asked.num_items)
    expected = np.mean([-log2(max(item, 1) / counts.sum()) for item in flat])
    assert metrics.novelty(ranked, counts, k) == pytest.approx(expected)


def test_intervals_have_the_width_of_the_normal_law():
    rng = np.random.default_rng(6)
    values = rng.normal([1.0, -2.0], [1.0, 3.0], (2000, 2))
    for column, interval in enumerate(metrics.bootstrap_intervals(values, 2000, seed=7)):
        half = 1.96 * values[:, column].std() / np.sqrt(len(values))
        assert interval.mean == pytest.approx(values[:, column].mean())
        assert interval.low == pytest.approx(interval.mean - half, abs=0.15 * half)
        assert interval.high == pytest.approx(interval.mean + half, abs=0.15 * half)


def test_bootstrap_is_seeded_and_paired():
    values = np.random.default_rng(8).random((50, 1))
    one = metrics.bootstrap_means(values, 300, seed=1)
    np.testing.assert_array_equal(one, metrics.bootstrap_means(values, 300, seed=1))
    assert not np.array_equal(one, metrics.bootstrap_means(values, 300, seed=2))
    (shifted,) = metrics.bootstrap_intervals((values + 0.25) - values, 300)
    assert shifted == pytest.approx((0.25, 0.25, 0.25))  # noise that both share cancels


def test_no_torch_is_loaded():
    import subprocess
    import sys

    code = "import sys, polyrec.evaluation.metrics, polyrec.evaluation.run; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
