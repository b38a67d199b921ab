"""`polyrec demo`: the whole life of a recommender on real data, from a bundled table of invoices to a served answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..hardware.base.config import HardwareConfig
from .hardware_flags import hardware_flags

if TYPE_CHECKING:
    from rich.console import Console

    from ..data.histories import Histories
    from ..engine.recommender import Recommender
    from ..evaluation.result import EvaluationResult
    from ..hardware import HardwareBackend

HISTORY_SHOWN = 8


@hardware_flags
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path("polyrec-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of SIDs, weights and batches.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, instead of the recipe's.")] = None,
    *,
    hardware: HardwareConfig,
) -> None:
    """Real data → semantic IDs → training → evaluation → recommendations, in a few minutes on two cores.

    What is finished is reused: run it again after an interruption and it goes on.
    """
    from rich.console import Console

    from ..data.interactions import load_histories
    from ..engine.recommender import Recommender
    from ..hardware import get_hardware_backend

    backend = get_hardware_backend(hardware.model_copy(update={"purpose": "train"}))
    started = time.perf_counter()
    console = Console()
    _claim(out, {"seed": seed, "steps": steps})
    prepared, model = out / "data", out / "model"
    console.rule("1 · UCI Online Retail → semantic IDs", align="left")
    _prepare(prepared, seed, console)
    console.rule("2 · training", align="left")
    _train(prepared, model, seed, steps, backend, console)
    console.rule("3 · evaluation on each customer's last invoice", align="left")
    recommender = Recommender.from_pretrained(model, backend=backend)
    histories = load_histories(prepared)
    result = _evaluate(recommender, histories, model, out / "evaluation", seed, console)
    console.rule("4 · one customer", align="left")
    _show_customer(recommender, histories, console)
    console.rule("result", align="left")
    _show_result(result, out, console)
    console.print(f"Done in {time.perf_counter() - started:.0f} s. Serve it:\n")
    console.print(f"  polyrec serve {model}", style="bold", highlight=False, markup=False)


def _claim(out: Path, settings: dict[str, int | None]) -> None:
    """Says whose folder this is; a demo with other settings must not mix with it."""
    from ..core.errors import ConfigError
    from ..core.files import read_json, write_json

    mark = out / "demo.json"
    if mark.is_file():
        if read_json(mark) != settings:
            raise ConfigError(
                "out_has_another_demo",
                f"{out} holds a demo with {read_json(mark)}, this one has {settings}.",
                "Name another folder with --out, or remove this one.",
            )
    elif out.is_dir() and any(out.iterdir()):
        raise ConfigError(
            "out_occupied", f"{out} exists and is not a demo's folder.", "Name a new or empty folder with --out."
        )
    else:
        write_json(mark, settings)


def _prepare(folder: Path, seed: int, console: Console) -> None:
    from ..core.console import progress_bar
    from ..data.prepare import STEPS, PrepareConfig, is_prepared, load_source, prepare

    # Nothing is chosen on validation events any more, so items bought in them may shape the SIDs.
    config = PrepareConfig(dataset="online-retail", vectors_from="fit+validation", seed=seed)
    dataset = load_source(config)
    console.print(
        f"{dataset.events.height:,} events of {dataset.events['user'].n_unique():,} customers, "
        f"{dataset.items.height:,} products",
        highlight=False,
    )
    if is_prepared(dataset, folder, config):
        console.print(f"{folder} is up to date", highlight=False, markup=False)
        return
    with progress_bar() as progress:
        task = progress.add_task("prepare", total=len(STEPS))

        def on_step(name: str) -> None:
            progress.update(task, description=f"prepare: {name}", completed=STEPS.index(name))

        prepare(dataset, folder, config, on_step=on_step)
        progress.update(task, description="prepare", completed=len(STEPS))


def _train(
    prepared: Path, model: Path, seed: int, steps: int | None, backend: HardwareBackend, console: Console
) -> None:
    from ..training import run
    from ..training.prepared import read_prepared
    from ..training.recipe import TrainConfig
    from .train import progress_events

    config = TrainConfig(fit_on="fit+validation", eval_every=0, seed=seed)
    if steps:
        config = config.model_copy(update={"steps": steps})
    data = read_prepared(prepared)
    if run.is_finished(data, model, config):
        console.print(f"{model} is up to date", highlight=False, markup=False)
        return
    with progress_events() as events:
        run.train(data, model, config, backend, events=events)


def _evaluate(
    recommender: Recommender, histories: Histories, model: Path, folder: Path, seed: int, console: Console
) -> EvaluationResult:
    from functools import partial

    from ..core.console import progress_bar
    from ..core.files import file_digest, read_json, write_json
    from ..evaluation.result import EvaluationResult
    from ..evaluation.run import BEAM_WIDTH, evaluate

    mark = {"model": file_digest(model / "model.safetensors"), "seed": seed}
    made = [folder / name for name in ("made_from.json", "evaluation.json", "evaluation.md", "evaluation.png")]
    if all(path.is_file() for path in made) and read_json(made[0]) == mark:
        console.print(f"{folder} is up to date", highlight=False, markup=False)
        return EvaluationResult.load(folder / "evaluation.json")
    with progress_bar() as progress:
        result = evaluate(
            {"Polyrec": partial(recommender.rank_rows, beam_width=BEAM_WIDTH)},
            histories,
            "test",
            (5, 10),
            invalid_rates={"Polyrec": partial(recommender.unconstrained_invalid_rate, beam_width=BEAM_WIDTH)},
            seed=seed,
            progress=progress,
        )
    result.save(folder)
    write_json(folder / "made_from.json", mark)
    return result


def _show_customer(recommender: Recommender, histories: Histories, console: Console) -> None:
    """A customer of the test: the end of what they bought before, what is recommended, and what they then bought."""
    from rich.table import Table

    from ..data.histories import eval_set
    from ..evaluation.run import BEAM_WIDTH

    asked = eval_set(histories, "test", only_new=True)
    row = _typical(asked)
    rows, baskets = asked.history(row)
    catalog = recommender.catalog
    entries = [
        [catalog.item_ids[item] for item in rows[baskets == basket]] for basket in dict.fromkeys(baskets.tolist())
    ]
    answer = recommender.recommend(entries, n=10, exclude_seen=True, beam_width=BEAM_WIDTH)
    bought = {catalog.item_ids[item] for item in asked.target(row)}
    console.print(
        f"Customer {histories.users[asked.users[row]]} bought {len(rows)} products in {len(entries)} invoices; the last:",
        highlight=False,
    )
    for item in rows[-HISTORY_SHOWN:]:
        console.print(f"  {catalog.names[item] or catalog.item_ids[item]}", highlight=False, markup=False)
    table = Table("", "recommended")
    for column in ("SID", "score", "bought next"):
        table.add_column(column, no_wrap=True)
    for place, item in enumerate(answer.items, 1):
        hit = "[green]yes[/]" if item.item_id in bought else ""
        table.add_row(str(place), item.name or item.item_id, item.sid, f"{item.score:.2f}", hit)
    console.print(table)


def _typical(asked: Any) -> int:
    """The first customer with a history of three invoices or more that still reads at a glance."""
    for row in range(len(asked)):
        items, baskets = asked.history(row)
        if baskets[-1] >= 2 and 20 <= len(items) <= 60:
            return row
    return 0


def _show_result(result: EvaluationResult, out: Path, console: Console) -> None:
    for table in result.to_tables():
        console.print(table)
    console.print(
        "«new» asks for products the customer had not bought before; «all» for the whole invoice. A third of «all» are "
        "repeats, which are itemKNN's strength: it remembers every product a customer ever bought.",
        highlight=False,
    )
    console.print(f"Picture and figures: {out / 'evaluation'}", highlight=False, markup=False)
