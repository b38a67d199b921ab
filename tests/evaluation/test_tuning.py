"""Tuning returns the best of its grid on validation, and never looks at the test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polyrec.data.histories import TEST, eval_set, known_before
from polyrec.evaluation.baselines import BasketItemKNN
from polyrec.evaluation.metrics import per_user_metrics
from polyrec.evaluation.tuning import TuningGrid, tune

GRID = TuningGrid(decay=(0.2, 1.0), shrinkage=(0.0, 5.0), size_power=(0.5,), repeat=(0.0, 2.0), repeat_decay=(0.9,))


def test_best_of_the_grid(make_histories):
    histories = make_histories(12, "basket", 80, 20)
    best = tune(histories, GRID)
    known, asked = known_before(histories, "validation"), eval_set(histories, "validation", only_new=True)

    def ndcg(settings):
        return per_user_metrics(BasketItemKNN(settings).fit(known).rank(asked, 10, True), asked, (10,))[
            "NDCG@10"
        ].mean()

    others = [best.model_copy(update={"decay": d, "shrinkage": s}) for d in GRID.decay for s in GRID.shrinkage]
    values = [ndcg(settings) for settings in others]
    assert max(values) > min(values)
    assert ndcg(best) == max(values)


def test_the_test_stage_does_not_matter(make_histories):
    histories = make_histories(13, "basket", 60)
    items = histories.items.copy()
    items[histories.split == TEST] = np.random.default_rng(0).integers(0, 12, int((histories.split == TEST).sum()))
    assert tune(histories, GRID) == tune(replace(histories, items=items), GRID)
