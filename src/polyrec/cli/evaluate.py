"""`polyrec evaluate`: flags to one evaluation of a model, or of the baselines alone, on a prepared folder."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.request import SCORE_HELP, ScoreRule
from ..hardware.base.config import HardwareConfig
from ..models.options import ModelOptions
from .hardware_flags import hardware_flags
from .model_flags import model_flags

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..data.histories import Histories
    from ..engine.engine import EngineConfig
    from ..evaluation.baselines import BasketKNNSettings
    from ..evaluation.run import InvalidRate, Ranker
    from ..hardware import HardwareBackend


class StageName(str, Enum):
    """The stages that can be asked."""

    validation = "validation"
    test = "test"


class ProtocolChoice(str, Enum):
    """The protocols, or both."""

    new = "new"
    all = "all"
    both = "both"


@hardware_flags
@model_flags
def evaluate(
    data: Annotated[Path, typer.Option(help="A folder made by `polyrec prepare`.")],
    model: Annotated[Path | None, typer.Option(help="A model folder; without it, the baselines alone.")] = None,
    stage: Annotated[StageName, typer.Option(help="Which events are asked for.")] = StageName.test,
    protocol: Annotated[
        ProtocolChoice,
        typer.Option(help="new: items not bought before, bought ones masked; all: everything, nothing masked."),
    ] = ProtocolChoice.both,
    ks: Annotated[str, typer.Option(help="Cut-offs, as in 5,10.")] = "5,10",
    max_users: Annotated[int | None, typer.Option(min=1, help="Ask only so many users, drawn by the seed.")] = None,
    beam_width: Annotated[
        int | None, typer.Option(min=1, help="Prefixes that live in the search (default 50).")
    ] = None,
    fit_only: Annotated[
        bool, typer.Option("--fit-only", help="Baselines learn from fit events alone, without validation.")
    ] = False,
    tune_baseline: Annotated[
        bool, typer.Option("--tune-baseline", help="Choose basket itemKNN's constants on validation first (a minute).")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for evaluation.json, .md and .png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.")] = False,
    samples: Annotated[int, typer.Option(min=2, help="Bootstrap draws behind the intervals.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap and of --max-users.")] = 0,
    score_rule: Annotated[ScoreRule, typer.Option(help=SCORE_HELP)] = "level",
    *,
    options: ModelOptions,
    hardware: HardwareConfig,
) -> None:
    """Measure a model beside popularity and itemKNN: full ranking, with confidence intervals."""
    from rich.console import Console

    from ..core.console import progress_bar
    from ..core.files import make_parent
    from ..data.interactions import load_histories
    from ..evaluation.run import BEAM_WIDTH, ProtocolName
    from ..evaluation.run import evaluate as run

    cuts = _cuts(ks)
    backend = _backend(hardware, options, model)
    if out:
        make_parent(out / "evaluation.json")  # before the work: a wrong folder should not cost a minute
    protocols: tuple[ProtocolName, ...] = ("new", "all")
    if protocol is not ProtocolChoice.both:
        protocols = (protocol.value,)
    histories = load_histories(data)
    rankings: dict[str, Ranker] = {}
    invalid_rates: dict[str, InvalidRate] = {}
    if model is not None and backend is not None:
        from ..engine.engine import EngineConfig

        config = EngineConfig(score_rule=score_rule, model=options)
        rankings, invalid_rates = _model_methods(model, data, histories, beam_width or BEAM_WIDTH, config, backend)
    with progress_bar() as progress:
        knn_settings = _tuned(histories, progress) if tune_baseline and histories.kind == "basket" else None
        result = run(
            rankings,
            histories,
            stage.value,
            cuts,
            protocols=protocols,
            max_users=max_users,
            fit_on="fit-split" if fit_only else "before-stage",
            knn_settings=knn_settings,
            invalid_rates=invalid_rates,
            samples=samples,
            seed=seed,
            progress=progress,
        )
    paths = result.save(out) if out else []
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    console = Console()
    for table in result.to_tables():
        console.print(table)
        console.print()
    for path in paths:
        console.print(f"wrote {path}", highlight=False, markup=False)


def _tuned(histories: Histories, progress: Progress) -> BasketKNNSettings:
    from ..evaluation.tuning import tune

    task = progress.add_task("tune basket itemKNN")
    return tune(histories, on_step=lambda done, steps: progress.update(task, completed=done, total=steps))


def _cuts(ks: str) -> tuple[int, ...]:
    from ..core.errors import ConfigError

    parts = [part.strip() for part in ks.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError("ks_invalid", f"--ks {ks!r} is not a list of numbers from 1.", "Write it as 5,10.")
    return tuple(sorted({int(part) for part in parts}))


def _backend(hardware: HardwareConfig, options: ModelOptions, model: Path | None) -> HardwareBackend | None:
    """Where the model runs; None without one: the baselines run in scipy on the host, and neither flags have a say."""
    from ..core.errors import ConfigError
    from ..hardware import get_hardware_backend

    if model is not None:
        return get_hardware_backend(hardware)
    settings = (hardware, options)
    if given := [name for own in settings for name, value in type(own)() if value != getattr(own, name)]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError("flag_unused", f"{flags} says where or how --model runs, and there is none.", "Leave it out.")
    return None


def _model_methods(
    model: Path, data: Path, histories: Histories, beam_width: int, config: EngineConfig, backend: HardwareBackend
) -> tuple[dict[str, Ranker], dict[str, InvalidRate]]:
    """The model as one more ranking; its catalog's rows must be those of the histories."""
    from functools import partial

    from ..core.errors import CatalogError
    from ..engine.recommender import Recommender
    from ..sid.catalog import Catalog

    recommender = Recommender.from_pretrained(model, backend=backend, config=config)
    if list(recommender.catalog.item_ids) != list(Catalog.load(data / "catalog.parquet").item_ids):
        raise CatalogError(
            "catalog_mismatch",
            f"The catalog of {model} ({len(recommender.catalog):,} items) is not that of {data} "
            f"({histories.num_items:,} items), so their rows mean different items.",
            "Evaluate the model on the prepared folder that it was trained from.",
        )
    name = "Polyrec"
    rank = partial(recommender.rank_rows, beam_width=beam_width)
    return {name: rank}, {name: partial(recommender.unconstrained_invalid_rate, beam_width=beam_width)}
