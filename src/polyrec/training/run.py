"""A whole training run: prepared folder in, model folder out; resumed where it stopped, reused when it is finished.

The model folder is written once, at the end, beside `run/`, which holds the recipe, provenance, log, TensorBoard events and
checkpoints. A run stopped at any moment leaves its last whole checkpoint, and the same command goes on from there.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import yaml

from .. import __version__
from ..core.errors import ConfigError, TrainingError
from ..core.files import atomic_path, file_digest, read_json, value_digest, write_json
from ..data.histories import known_before
from ..data.loader import ExampleLoader
from ..data.prompt import PromptBuilder
from ..engine.folder import CATALOG, POLYREC_JSON, write_facts
from ..hardware.base.backend import HardwareBackend
from ..hardware.table import report_never_called
from ..models.checkpoint import save_model
from ..models.extend import SINGLE as WEIGHTS
from ..sid.catalog import Catalog
from ..sid.tokenizer import num_tokens, save_tokenizer
from .accelerate import compiles, layer_form, num_parameters, prepare_layers
from .build import start_model
from .checkpoint import (
    checkpoints,
    load_checkpoint,
    remove_leftovers,
    restore,
    save_checkpoint,
    snapshot,
)
from .objective import Objective
from .prepared import PreparedData
from .recipe import TrainConfig
from .trainer import Progress, StepFacts, Trainer
from .validate import Validator

RUN, FINISHED, PROVENANCE = "run", "finished.json", "provenance.json"


@dataclass(frozen=True)
class RunEvents:
    """Whom to tell. on_start(first step, last step); on_step; on_validation(step, NDCG@10)."""

    on_start: Callable[[int, int], None] = lambda first, last: None
    on_step: Callable[[StepFacts], None] = lambda facts: None
    on_validation: Callable[[int, float], None] = lambda step, ndcg: None


def plan(data: PreparedData, config: TrainConfig, backend: HardwareBackend) -> dict[str, Any]:
    """What a run would do: model size, examples, steps, epochs. Builds the model, trains nothing."""
    run = _Run(data, config, backend)
    parameters = sum(parameter.numel() for parameter in run.trainer.model.parameters())
    batch = run.loader.batch(0)
    return {
        "parameters": parameters,
        "vocab_size": int(run.trainer.model.config.vocab_size),
        "examples_per_epoch": run.loader.examples_per_epoch,
        "steps": config.steps,
        "epochs": round(config.steps / run.loader.steps_per_epoch, 2),
        "tokens_per_step": len(batch.token_ids),
        "labels_per_step": batch.num_labels,
        "recipe_digest": run_digest(data, config),
    }


def run_digest(data: PreparedData, config: TrainConfig) -> str:
    """The same digest, the same model: data and recipe, without what only changes how often one looks."""
    recipe = config.model_dump(exclude={"checkpoint_every", "keep_checkpoints"})
    inputs = {}  # a file that the recipe only names may change under its name
    if config.model_config_file and Path(config.model_config_file).is_file():
        inputs["model_config_file"] = file_digest(config.model_config_file)
    return value_digest({"data": data.digest, "recipe": recipe, **inputs})


def is_finished(data: PreparedData, out: str | Path, config: TrainConfig) -> bool:
    """Whether `out` holds exactly what this run would give."""
    out = Path(out)
    path = out / RUN / FINISHED
    whole = path.is_file() and (out / WEIGHTS).is_file() and (out / CATALOG).is_file()
    return whole and read_json(path).get("recipe_digest") == run_digest(data, config)


def train(
    data: PreparedData,
    out: str | Path,
    config: TrainConfig,
    backend: HardwareBackend,
    *,
    force: bool = False,
    events: RunEvents | None = None,
) -> Path:
    """Trains, or goes on training, or finds it done; returns the model folder."""
    out, events = Path(out), events or RunEvents()
    _check_out(data, out, config, force)
    if force and (out / RUN).exists():
        shutil.rmtree(out / RUN)
    if is_finished(data, out, config):
        return out
    run = _Run(data, config, backend)
    best = run.resume(out / RUN)
    validator = Validator(run.trainer.result, data, config, backend)
    if config.patience and len(validator) == 0:
        raise TrainingError(
            "nobody_to_validate",
            "Early stopping needs validation users with a history and a target, and there are none.",
            "Set patience to 0, or prepare the data with another --split.",
        )
    _write_provenance(data, out, config)  # late: a recipe that is refused must not claim the folder
    progress = run.trainer.progress
    first_step = progress.step + 1
    events.on_start(progress.step, config.steps)
    with _Log(out / RUN, progress.step) as log:

        def after_step(facts: StepFacts) -> bool:
            log.step(facts)
            events.on_step(facts)
            if facts.step == first_step:
                report_never_called(backend)
            more = True
            if config.validates and (facts.step % config.eval_every == 0 or facts.step == config.steps):
                ndcg = validator.ndcg()
                log.validation(facts.step, ndcg)
                events.on_validation(facts.step, ndcg)
                _note_validation(progress, ndcg)
                more = not _is_stopped(progress, config)
                if config.patience and progress.best_step == facts.step:
                    best.clear()
                    best.update(snapshot(run.trainer.result))
            if facts.step % config.checkpoint_every == 0 or not more or facts.step == config.steps:
                run.save(out / RUN, best, config.keep_checkpoints)
            return more

        if not _is_stopped(progress, config):  # a run may have been killed between its early stop and its model folder
            run.trainer.run(after_step)
    if best:
        restore(run.trainer.result, best)
    _write_model(run, out, config)
    return out


class _Run:
    """The parts of one run, built from its recipe."""

    def __init__(self, data: PreparedData, config: TrainConfig, backend: HardwareBackend) -> None:
        backend.runtime.seed(config.seed)
        self.data = data
        self.backend = backend
        self.prompts = PromptBuilder(data.layout, config.prompt)
        self.known = known_before(data.histories, "validation" if config.fit_on == "fit" else "test")
        self.loader = ExampleLoader(self.known, data.catalog.codes, self.prompts, config.sampling, config.seed)
        longest = self.prompts.max_tokens + data.layout.depth
        model, self.spec = start_model(
            config, num_tokens(data.tokenizer), data.layout, data.codebooks, longest, backend
        )
        needs = model.attention_needs(model.head_weight.dtype, train=True)
        objective = Objective(data.layout, config.head, backend, needs)
        choice = config.compile, num_parameters(model), backend
        self.trainer = Trainer(
            model, self.loader, objective, config.optim, config.steps, ops=backend.ops, compiled=compiles(*choice)
        )
        prepare_layers(model, layer_form(*choice), checkpointed=config.checkpoint_activations)

    def resume(self, folder: Path) -> dict[str, torch.Tensor]:
        """Goes to the newest checkpoint, if there is one; returns the best weights so far (empty without early stopping)."""
        remove_leftovers(folder / "checkpoints")
        found = checkpoints(folder / "checkpoints")
        if not found:
            return {}
        self.trainer.progress, rng = load_checkpoint(found[-1], self.trainer)
        self.backend.runtime.set_rng_state(rng)
        best = found[-1] / "best.pt"
        return torch.load(best, weights_only=True) if best.is_file() else {}

    def save(self, folder: Path, best: dict[str, torch.Tensor], keep: int) -> None:
        save_checkpoint(folder / "checkpoints", self.trainer, self.backend.runtime.rng_state(), best, keep)


def _note_validation(progress: Progress, ndcg: float) -> None:
    if ndcg > progress.best:
        progress.best, progress.best_step, progress.since_best = ndcg, progress.step, 0
    else:
        progress.since_best += 1


def _is_stopped(progress: Progress, config: TrainConfig) -> bool:
    return bool(config.patience) and progress.since_best >= config.patience


def _check_out(data: PreparedData, out: Path, config: TrainConfig, force: bool) -> None:
    started = out / RUN / PROVENANCE
    if started.is_file() and not force:
        if read_json(started).get("recipe_digest") != run_digest(data, config):
            raise ConfigError(
                "out_has_another_run",
                f"{out} holds a run with another recipe or other data.",
                "Name another folder with --out, or give --force to replace it.",
            )
    elif out.exists() and not started.is_file() and not (_holds_only_run(out) or (force and _is_model(out))):
        raise ConfigError(
            "out_occupied", f"{out} exists and is not a training run.", "Name a new or empty folder with --out."
        )


def _holds_only_run(out: Path) -> bool:
    """An empty folder, or one of a run that was killed before it had written its first file."""
    return out.is_dir() and all(path.name == RUN for path in out.iterdir())


def _is_model(out: Path) -> bool:
    return (out / POLYREC_JSON).is_file()


def _write_provenance(data: PreparedData, out: Path, config: TrainConfig) -> None:
    folder = out / RUN
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "recipe.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    write_json(
        folder / PROVENANCE,
        {
            "recipe_digest": run_digest(data, config),
            "data_digest": data.facts["data_digest"],
            "prepared_digest": data.digest,
            "seed": config.seed,
            "polyrec": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": version("numpy"),
            "threads": torch.get_num_threads(),
        },
    )


def _write_model(run: _Run, out: Path, config: TrainConfig) -> None:
    """The plain Hugging Face folder, polyrec.json and the catalog; the mark of a finished run comes last.

    The weights come after all that says how to read them, and older weights go first: a folder written by half does not
    load, where weights beside another run's polyrec.json, or beside none, would load and answer wrongly.
    """
    data = run.data
    (out / WEIGHTS).unlink(missing_ok=True)
    save_tokenizer(data.tokenizer, out, config.init_from)
    counts = np.bincount(run.known.items, minlength=len(data.catalog))
    Catalog(data.catalog.item_ids, data.catalog.codes, data.catalog.names, counts).save(out / CATALOG)
    shutil.copyfile(data.path / "codebooks.safetensors", out / "codebooks.safetensors")
    progress = run.trainer.progress
    digest = run_digest(data, config)
    write_facts(
        out,
        data.layout,
        config.prompt,
        data.histories.kind,
        data.facts["fingerprint"],
        {"recipe_digest": digest, "steps": progress.step, "polyrec": __version__},
    )
    save_model(run.trainer.result, run.spec, out)
    best = None if progress.best < 0 else {"step": progress.best_step, "ndcg@10": progress.best}
    write_json(
        out / RUN / FINISHED,
        {"recipe_digest": digest, "steps": progress.step, "seconds": progress.seconds, "best_validation": best},
    )


class _Log:
    """log.jsonl and TensorBoard events of one run; lines after the resumed step are dropped, so none stands twice."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / "log.jsonl"
        kept = []
        if self._path.is_file():
            lines = [
                json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines() if line.endswith("}")
            ]
            kept = [line for line in lines if line["step"] <= step]
        with atomic_path(self._path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._stream: TextIO = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed in __exit__)

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._writer.close()

    def step(self, facts: StepFacts) -> None:
        line = {
            "step": facts.step,
            "loss": facts.loss,
            "loss_by_level": list(facts.by_level),
            "grad_norm": facts.grad_norm,
            "learning_rate": facts.learning_rate,
            "tokens_per_second": round(facts.tokens / facts.seconds),
        }
        self._write(line)

    def validation(self, step: int, ndcg: float) -> None:
        self._write({"step": step, "validation_ndcg@10": ndcg})

    def _write(self, line: dict[str, Any]) -> None:
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()
        for name, value in line.items():
            if isinstance(value, float | int) and name != "step":
                self._writer.add_scalar(name, value, line["step"])
