"""The few constants of basket itemKNN, chosen on the validation stage: a strong opponent, not a straw man."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from ..core.config import Settings
from ..data.histories import EvalSet, Histories, eval_set, known_before
from .baselines import BasketItemKNN, BasketKNNSettings
from .metrics import per_user_metrics


class TuningGrid(Settings):
    """Values tried: neighbour constants on protocol new, then the repeat constants on protocol all."""

    decay: tuple[float, ...] = (0.6, 0.7, 0.8, 0.9)
    shrinkage: tuple[float, ...] = (2.0, 10.0)
    size_power: tuple[float, ...] = (0.0, 0.5)
    repeat: tuple[float, ...] = (0.2, 0.4, 0.8)
    repeat_decay: tuple[float, ...] = (0.8, 0.9)


def tune(
    histories: Histories,
    grid: TuningGrid | None = None,
    k: int = 10,
    on_step: Callable[[int, int], None] | None = None,
) -> BasketKNNSettings:
    """The settings with the best NDCG@k on validation; of equals the first of the grid.

    on_step: told (steps done, steps in all).
    """
    grid = grid or TuningGrid()
    known = known_before(histories, "validation")
    neighbours = [
        {"shrinkage": shrinkage, "decay": decay, "size_power": power}
        for shrinkage, decay, power in product(grid.shrinkage, grid.decay, grid.size_power)
    ]
    repeats = [{"repeat": repeat, "repeat_decay": decay} for repeat, decay in product(grid.repeat, grid.repeat_decay)]
    steps = len(neighbours) + len(repeats)
    done = 0
    best = BasketKNNSettings()
    for only_new, choices in ((True, neighbours), (False, repeats)):
        asked = eval_set(histories, "validation", only_new=only_new)
        scored = []
        for choice in choices:
            settings = best.model_copy(update=choice)
            scored.append((_ndcg(BasketItemKNN(settings).fit(known), asked, k, only_new), settings))
            done += 1
            if on_step:
                on_step(done, steps)
        best = max(scored, key=lambda pair: pair[0])[1]
    return best


def _ndcg(baseline: BasketItemKNN, asked: EvalSet, k: int, mask_seen: bool) -> float:
    return float(per_user_metrics(baseline.rank(asked, k, mask_seen), asked, (k,))[f"NDCG@{k}"].mean())
