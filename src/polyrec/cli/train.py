"""`polyrec train`: flags and config file to TrainConfig, then a run with progress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..hardware.base.config import HardwareConfig
from .hardware_flags import hardware_flags

if TYPE_CHECKING:
    from ..training.recipe import TrainConfig


@hardware_flags
def train(
    data: Annotated[Path, typer.Option(help="A folder made by `polyrec prepare`.")],
    out: Annotated[Path, typer.Option(help="The model folder to make.")],
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; flags win over it.")] = None,
    size: Annotated[str | None, typer.Option(help="tiny, small, base, 0.6b, 1.7b.")] = None,
    model_config_file: Annotated[
        Path | None, typer.Option(help="A Hugging Face config.json instead of --size.")
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="A Hugging Face folder to go on from (see `polyrec prepare --tokenizer`).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps: fixed, so that runs repeat.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Histories a step.")] = None,
    max_items: Annotated[int | None, typer.Option(min=1, help="Longest history, in items.")] = None,
    fit_on: Annotated[
        str | None, typer.Option(help="fit, or fit+validation for a last fit when nothing is chosen any more.")
    ] = None,
    patience: Annotated[
        int | None, typer.Option(min=0, help="Validations without a better NDCG@10 before stopping; 0: never.")
    ] = None,
    eval_every: Annotated[int | None, typer.Option(min=0, help="Steps between validations; 0: none.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of weights and batches.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be trained, and leave.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A summary as JSON on standard output.")] = False,
    *,
    hardware: HardwareConfig,
) -> None:
    """Train a model on prepared data. An interrupted run goes on with the same command."""
    from ..core.errors import ConfigError
    from ..hardware import get_hardware_backend
    from ..training import run
    from ..training.prepared import read_prepared

    backend = get_hardware_backend(hardware.model_copy(update={"purpose": "train"}))
    flags = {
        "size": size,
        "model_config_file": _text(model_config_file),
        "init_from": _text(init_from),
        "steps": steps,
        "optim.learning_rate": learning_rate,
        "sampling.batch_size": batch_size,
        "prompt.max_items": max_items,
        "fit_on": fit_on,
        "patience": patience,
        "eval_every": eval_every,
        "seed": seed,
    }
    if size and (model_config_file or init_from):
        raise ConfigError(
            "size_unused", f"--size {size} has no say beside a model's own config.", "Give one of the two."
        )
    recipe = read_recipe(config, flags)
    prepared = read_prepared(data)
    plan = run.plan(prepared, recipe, backend)
    if dry_run:
        print(json.dumps({"plan": plan, "recipe": recipe.model_dump(mode="json")}, indent=2))
        return
    if run.is_finished(prepared, out, recipe) and not force:
        _say(f"{out} is up to date: the same recipe and data were trained already (--force trains again).")
    else:
        _say(f"training {plan['parameters']:,} parameters for {recipe.steps:,} steps ({plan['epochs']} epochs)")
        with progress_events() as events:
            run.train(prepared, out, recipe, backend, force=force, events=events)
        _say(f"wrote {out}")
    finished = json.loads((out / run.RUN / run.FINISHED).read_text(encoding="utf-8"))
    if as_json:
        print(json.dumps({"model": str(out), "plan": plan, **finished}))


def read_recipe(config: Path | None, flags: dict[str, Any]) -> TrainConfig:
    """The config file's settings with the given flags over them; a dot names a nested setting."""
    from ..core.config import make_settings, read_config_file
    from ..training.recipe import TrainConfig

    values = read_config_file(config) if config else {}
    for name, value in flags.items():
        if value is None:
            continue
        *path, last = name.split(".")
        inner = values
        for part in path:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):  # else the file's value is no group of settings, which is told below
            inner[last] = value
    return make_settings(TrainConfig, values, str(config) if config else "the flags")


class progress_events:
    """A progress bar with loss, tokens/s and the last validation, as the events of a run."""

    def __enter__(self) -> Any:
        from ..core.console import progress_bar
        from ..training.run import RunEvents

        self._bar = progress_bar("{task.fields[facts]}")
        self._bar.start()
        self._task = self._bar.add_task("train", total=None, facts="")
        self._ndcg = ""
        return RunEvents(on_start=self._start, on_step=self._step, on_validation=self._validation)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _start(self, first: int, last: int) -> None:
        self._bar.update(self._task, total=last, completed=first)

    def _step(self, facts: Any) -> None:
        text = f"loss {facts.loss:.3f} · {facts.tokens / facts.seconds:,.0f} tokens/s{self._ndcg}"
        self._bar.update(self._task, completed=facts.step, facts=text)

    def _validation(self, step: int, ndcg: float) -> None:
        self._ndcg = f" · NDCG@10 {ndcg:.4f} (step {step})"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _say(text: str) -> None:
    from ..core.console import status_console

    status_console().print(text, highlight=False, markup=False, soft_wrap=True)
