"""Checkpoints of a run: everything a later process needs to go on as if nothing had happened. Each is whole or absent."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..core.errors import TrainingError
from ..core.files import atomic_folder, read_json, write_json
from ..hardware.base.runtime import RngState
from .trainer import Progress, Trainer

_PREFIX = "step-"


def save_checkpoint(folder: Path, trainer: Trainer, rng: RngState, best: dict[str, torch.Tensor], keep: int) -> None:
    """Writes `step-N` and then removes all but the newest `keep`.

    rng: the state of every generator. best: weights of the best validation, or empty.
    """
    with atomic_folder(folder / f"{_PREFIX}{trainer.progress.step:08d}") as temporary:
        save_file(snapshot(trainer.model), temporary / "model.safetensors")
        averaged = trainer.averaged.state_dict() if trainer.averaged is not None else None
        state = {"optimizer": trainer.optimizer.state_dict(), "averaged": averaged, "rng": dict(rng)}
        torch.save(state, temporary / "optimizer.pt")
        if best:
            torch.save(best, temporary / "best.pt")
        write_json(temporary / "progress.json", asdict(trainer.progress))
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(path: Path, trainer: Trainer) -> tuple[Progress, RngState]:
    """Puts a checkpoint into model, average and optimizer; returns its progress and the generators' states (uint8)."""
    restore(trainer.model, load_file(path / "model.safetensors"))
    state = torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu")
    trainer.optimizer.load_state_dict(state["optimizer"])
    if trainer.averaged is not None:
        trainer.averaged.load_state_dict(state["averaged"])
    return Progress(**read_json(path / "progress.json")), state["rng"]


def checkpoints(folder: Path) -> list[Path]:
    """All whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if (path / "progress.json").is_file())


def remove_leftovers(folder: Path) -> None:
    """Removes what a process that was killed while it wrote a checkpoint left half-written."""
    for path in folder.glob(f".{_PREFIX}*"):
        shutil.rmtree(path)


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A host copy of all parameters, by our own names; dtypes and shapes as in the model."""
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def restore(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copies a snapshot back."""
    parameters = dict(model.named_parameters())
    if set(parameters) != set(weights):
        raise TrainingError(
            "checkpoint_of_another_model",
            "The checkpoint's weights are not this model's.",
            "Use --force to start anew.",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
