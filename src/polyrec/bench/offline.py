"""The engine in this process, batch after batch: the search alone, without HTTP. Prompts are built before the clock runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.config import make_settings
from ..core.errors import ConfigError
from ..core.request import RecommendRequest
from ..engine.engine import EngineConfig
from ..engine.folder import read_folder
from ..engine.front import Prepared
from ..engine.graphs import graph_sizes
from ..engine.recommender import Recommender, load_decoder
from ..engine.searches import SearchResult
from ..hardware.base.backend import HardwareBackend
from ..models.options import ModelOptions
from ..models.spec import Decoder
from .cases import Case, Target, fault_of, fresh_seed
from .report import summary


def load(
    target: Target, cases: Sequence[Case], backend: HardwareBackend, options: ModelOptions, settings: Sequence[str]
) -> tuple[Recommender, Decoder]:
    """The folder's model, alone and in an engine whose limits let each case's batch run as one.

    settings: KEY=VALUE texts over EngineConfig's fields.
    """
    limits = {
        "max_requests": max(case.load for case in cases),
        "max_tokens": max(case.load * target.tokens_of(case.items) for case in cases),
        "max_beams": max(case.load * case.n for case in cases),
    }
    graphs = graph_sizes(
        max(case.n for case in cases)
    )  # a width of the next larger power of two might not fit the limits
    values = {"limits": limits, "model": options, "graphs": graphs.model_dump()}
    config = make_settings(EngineConfig, with_settings(values, settings), "--set")
    contents = read_folder(target.path)
    model = load_decoder(target.path, contents, backend, config)
    return Recommender(model, contents, backend, config), model


def with_settings(values: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`a.b=c` texts over nested values; what a value means is settled by the class that reads it."""
    for text in settings:
        name, equals, value = text.partition("=")
        *path, last = name.split(".")
        inner = values
        for part in path:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else {}
        if not equals or not last or not isinstance(inner, dict):
            raise ConfigError(
                "setting_invalid", f"'{text}' sets nothing.", "Write NAME=VALUE, as limits.max_requests=8."
            )
        inner[last] = None if value == "none" else value
    return values


def prepare(recommender: Recommender, histories: list[list[str]], n: int) -> list[Prepared]:
    """Requests, ready to search."""
    prepared = [recommender.prepare(RecommendRequest(history=history, n=n)) for history in histories]
    assert all(isinstance(one, Prepared) for one in prepared), "every history holds items of the catalog"
    return [one for one in prepared if isinstance(one, Prepared)]


def run_case(recommender: Recommender, target: Target, case: Case, requests: int, warmup: int) -> dict[str, Any]:
    """Batches of `case.load` different histories, as many as hold the requests, one after another; each answer is checked
    once the clock has stopped.

    latency: of a whole batch. answer_ms: the time that turning a batch's results into items with ids, names and SIDs takes.
    """
    num_batches = -(-requests // case.load)
    histories = target.histories((warmup + num_batches) * case.load, case.items, fresh_seed())
    prepared = prepare(recommender, histories, case.n)
    batches = [prepared[start : start + case.load] for start in range(0, len(prepared), case.load)]
    latencies, results = [], []
    for number, batch in enumerate(batches):
        if number == warmup:
            began = time.perf_counter()
        start = time.perf_counter()
        results.append(recommender.engine.run([one.search for one in batch]))
        latencies.append(time.perf_counter() - start)
    seconds = time.perf_counter() - began
    answer_ms, faults = [], []
    for batch, found in zip(batches[warmup:], results[warmup:], strict=True):
        faults += [fault for result in found if (fault := fault_of_scores(result))]
        start = time.perf_counter()
        answers = [recommender.finish(one, result) for one, result in zip(batch, found, strict=True)]
        answer_ms.append((time.perf_counter() - start) * 1e3)
        items = [[(item.item_id, item.sid) for item in answer.items] for answer in answers]
        faults += [fault for one in items if (fault := fault_of(one, case.n, target.catalog))]
    return {
        "tokens": target.tokens_of(case.items),
        "items": case.items,
        "n": case.n,
        "batch": case.load,
        **summary(latencies[warmup:], seconds, num_batches * case.load),
        "answer_ms": statistics.median(answer_ms),
        "faulty_answers": len(faults),
        "first_fault": faults[0] if faults else None,
    }


def fault_of_scores(result: SearchResult) -> str | None:
    """Scores are log-probabilities, best first."""
    scores = np.asarray(result.scores)
    falls = bool(np.isfinite(scores).all() and (np.diff(scores) <= 0).all())
    return None if falls else f"scores are not finite, or not best first: {scores[:4].tolist()} …"
