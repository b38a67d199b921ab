"""One comparison: methods × protocols × metrics on the users of one stage, full ranking, with bootstrap intervals.

Protocols: **new** asks for items not bought before, bought ones masked; **all** asks for everything that followed,
nothing masked. Within a protocol every method follows the same rule, sees the same users and the same bootstrap draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from rich.progress import Progress

from ..core.errors import DataError
from ..data.histories import EvalSet, Histories, Kind, Stage, eval_set, known_before
from .baselines import Baseline, BasketItemKNN, BasketKNNSettings, Popularity, SequenceItemKNN, item_counts
from .metrics import (
    Interval,
    bootstrap_intervals,
    duplicate_rate,
    invalid_rate,
    item_coverage,
    novelty,
    per_user_metrics,
)
from .ranking import take_users, user_blocks
from .result import EvaluationResult, MethodResult, ProtocolResult

ProtocolName = Literal["new", "all"]
Ranker = Callable[[EvalSet, int, bool], np.ndarray]  # (eval set, k, mask_seen) -> int [N, k] catalog rows, −1 = nothing
# (eval set, k) -> share of unconstrained beams that name no item; None: it cannot be measured
InvalidRate = Callable[[EvalSet, int], float | None]
FitOn = Literal["before-stage", "fit-split"]

BEAM_WIDTH = (
    50  # a model's prefixes while it is judged at 10: NDCG@10 at 10, 20, 50, 150 was .0777, .0797, .0807, .0805
)
_INVALID_USERS = 1000  # enough for a rate to ±.01 at 10 places each
_BLOCK = 512  # users ranked per call: how often the progress bar moves


def baseline_rankings(
    histories: Histories,
    stage: Stage,
    fit_on: FitOn = "before-stage",
    knn_settings: BasketKNNSettings | None = None,
) -> dict[str, Ranker]:
    """Popularity and the itemKNN of the data's kind, fitted.

    fit_on: everything before the stage (validation included when testing), or the fit events alone, as leave-one-out
    papers do.
    """
    known = known_before(histories, stage if fit_on == "before-stage" else "validation")
    return {name: baseline.fit(known).rank for name, baseline in _baselines(histories.kind, knn_settings).items()}


def evaluate(
    rankings: Mapping[str, Ranker],
    histories: Histories,
    stage: Stage = "test",
    ks: tuple[int, ...] = (5, 10),
    *,
    protocols: tuple[ProtocolName, ...] = ("new", "all"),
    max_users: int | None = None,
    baselines: bool = True,
    fit_on: FitOn = "before-stage",
    knn_settings: BasketKNNSettings | None = None,
    invalid_rates: Mapping[str, InvalidRate] | None = None,
    samples: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Ranks with every method and measures it; the methods of `rankings` first, the baselines after them.

    knn_settings: constants of basket itemKNN, from `tuning.tune`; by default those of the bundled data.
    max_users: a seeded draw of that many users per protocol. invalid_rates: for methods whose constrained ranking
    cannot be invalid, the rate of their unconstrained beams at the largest k (on at most 1,000 users), by method name;
    others are counted from their rankings.
    Raises DataError when a protocol has no user to ask.
    """
    ks = tuple(sorted(set(ks)))
    methods: dict[str, Ranker] = dict(rankings)
    if baselines:
        methods.update(baseline_rankings(histories, stage, fit_on, knn_settings))
    counts = item_counts(known_before(histories, stage))
    results: dict[str, ProtocolResult] = {}
    for protocol in protocols:
        asked = _asked_users(histories, stage, protocol, max_users, seed)
        ranked, seconds = {}, {}
        for name, rank in methods.items():
            started = time.perf_counter()
            ranked[name] = _rank_all(f"{name}, {protocol}", rank, asked, max(ks), protocol == "new", progress)
            seconds[name] = time.perf_counter() - started
        some = draw_users(asked, _INVALID_USERS, seed)
        unconstrained = {name: rate(some, max(ks)) for name, rate in (invalid_rates or {}).items()}
        results[protocol] = measure_rankings(ranked, asked, ks, counts, unconstrained, seconds, samples, seed)
    return EvaluationResult(
        stage=stage,
        kind=histories.kind,
        ks=ks,
        num_items=histories.num_items,
        seed=seed,
        samples=samples,
        protocols=results,
    )


def measure_rankings(
    ranked: Mapping[str, np.ndarray],
    asked: EvalSet,
    ks: tuple[int, ...],
    counts: np.ndarray,
    unconstrained: Mapping[str, float | None],
    seconds: Mapping[str, float],
    samples: int,
    seed: int,
) -> ProtocolResult:
    """Metrics of all methods on one eval set; differences are of the first method against each other one, paired."""
    per_user = {name: per_user_metrics(ranking, asked, ks) for name, ranking in ranked.items()}
    first = next(iter(per_user))
    names = list(per_user[first])
    columns = [values[name] for values in per_user.values() for name in names]
    others = [name for name in per_user if name != first]
    columns += [per_user[first][name] - per_user[other][name] for other in others for name in names]
    intervals = iter(bootstrap_intervals(np.stack(columns, axis=1), samples, seed))
    measured: dict[str, dict[str, Interval]] = {
        method: {name: next(intervals) for name in names} for method in per_user
    }
    differences = {other: {name: next(intervals) for name in names} for other in others}
    methods = {}
    for method, ranking in ranked.items():
        rates: dict[str, float] = {}
        for k in ks:
            rates[f"Coverage@{k}"] = item_coverage(ranking, asked.num_items, k)
            rates[f"Novelty@{k}"] = novelty(ranking, counts, k)
            if method not in unconstrained:
                rates[f"Invalid@{k}"] = invalid_rate(ranking, k)
            rates[f"Duplicate@{k}"] = duplicate_rate(ranking, k)
        if (free := unconstrained.get(method)) is not None:
            rates[f"Invalid@{max(ks)}"] = free
        methods[method] = MethodResult(metrics=measured[method], rates=rates, seconds=seconds[method])
    return ProtocolResult(num_users=len(asked), methods=methods, compared=first, differences=differences)


def draw_users(asked: EvalSet, max_users: int | None, seed: int) -> EvalSet:
    """At most `max_users` of them, drawn by the seed, in their order."""
    if max_users is None or max_users >= len(asked):
        return asked
    drawn = np.random.default_rng(seed).choice(len(asked), max_users, replace=False)
    return take_users(asked, np.sort(drawn))


def _baselines(kind: Kind, knn_settings: BasketKNNSettings | None) -> dict[str, Baseline]:
    if kind == "basket":
        return {"popularity": Popularity(), "basket itemKNN": BasketItemKNN(knn_settings or BasketKNNSettings())}
    return {"popularity": Popularity(), "itemKNN A": SequenceItemKNN("A"), "itemKNN B": SequenceItemKNN("B")}


def _asked_users(
    histories: Histories, stage: Stage, protocol: ProtocolName, max_users: int | None, seed: int
) -> EvalSet:
    asked = eval_set(histories, stage, only_new=protocol == "new")
    if not len(asked):
        raise DataError(
            "no_evaluation_users",
            f"No user has a history and a target at stage '{stage}' under protocol '{protocol}'.",
            "Use data with at least two events (or baskets) per user, another --stage or another --protocol.",
        )
    return draw_users(asked, max_users, seed)


def _rank_all(
    label: str, rank: Ranker, asked: EvalSet, k: int, mask_seen: bool, progress: Progress | None
) -> np.ndarray:
    task = progress.add_task(label, total=len(asked)) if progress else None
    blocks = []
    for block in user_blocks(asked, _BLOCK):
        blocks.append(rank(block, k, mask_seen))
        if progress and task is not None:
            progress.advance(task, len(block))
    return np.concatenate(blocks)
