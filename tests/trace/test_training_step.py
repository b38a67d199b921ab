"""Walks a training run of two steps from its recipe to its model folder, and compares what is entered with docs/tour.md."""

from __future__ import annotations

import pytest
import torch
from recorder import documented_files, documented_steps, recording
from small_shop import SIZES, prepare_shop

from polyrec.core.files import write_json
from polyrec.hardware import get_hardware_backend
from polyrec.training import run
from polyrec.training.prepared import read_prepared
from polyrec.training.recipe import TrainConfig

TITLE = "A training step"
PATH = [
    "training/recipe.py", "training/run.py", "data/loader.py", "training/build.py", "training/trainer.py",
    "data/loader.py", "data/prompt.py", "data/packing.py", "training/recipe.py", "training/objective.py",
    "attention/layout.py", "models/qwen3.py", "layers/attention.py", "attention/sdpa.py", "training/trainer.py",
    "training/validate.py", "training/checkpoint.py", "models/checkpoint.py",
]  # fmt: skip
ONE_STEP = slice(4, 15)
BACKWARD, CLIP, UPDATE = ("torch", "backward"), ("torch", "clip_grad_norm_"), ("torch", "AdamW.step")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The recorder of a whole run, and the calls of its first step alone."""
    folder = tmp_path_factory.mktemp("traced")
    data, backend = read_prepared(prepare_shop(folder)), get_hardware_backend()
    write_json(folder / "config.json", SIZES)
    marks = []
    with recording() as recorder, pytest.MonkeyPatch.context() as patch:
        for owner, name, step in (
            (torch.Tensor, "backward", BACKWARD),
            (torch.nn.utils, "clip_grad_norm_", CLIP),
            (torch.optim.AdamW, "step", UPDATE),
        ):
            patch.setattr(owner, name, noted(getattr(owner, name), step, recorder.calls))
        events = run.RunEvents(on_step=lambda _: marks.append(len(recorder.calls)))
        recorder.active = True
        config = TrainConfig(
            model_config_file=str(folder / "config.json"), steps=2, eval_every=2, checkpoint_every=2,
            prompt={"max_items": 8},
        )  # fmt: skip
        run.train(data, folder / "out", config, backend, events=events)
        recorder.active = False
    start = recorder.calls.index(("training/trainer.py", "train_step"))
    return recorder, recorder.calls[start : marks[0]]


def noted(function, step, calls):
    def wrapper(*args, **kwargs):
        calls.append(step)
        return function(*args, **kwargs)

    return wrapper


def test_the_path_is_the_documented_one(trained):
    recorder, _ = trained
    steps = documented_steps(TITLE)
    assert [file for file, _ in steps] == PATH
    assert recorder.first_entries(steps) == steps


def test_a_step_ends_with_backward_clip_and_update(trained):
    _, calls = trained
    steps = [*documented_steps(TITLE)[ONE_STEP][:-1], BACKWARD, ("training/trainer.py", "_clip"), CLIP, UPDATE]
    order = list(dict.fromkeys(call for call in calls if call in steps))
    assert order == steps
    for once in (steps[0], BACKWARD, CLIP, UPDATE):
        assert calls.count(once) == 1, once
    made = ("data/loader.py", "batch")
    assert calls.count(made) == calls.count(("data/packing.py", "pack")) == 2, "its own batch, and the next step's"
    assert calls.index(UPDATE) < len(calls) - 1 - calls[::-1].index(made), "the next one's while a device works"


def test_every_file_of_a_step_is_documented(trained):
    """Logging and the callers of `train_step` apart, a step enters the files of the tour and no others."""
    _, calls = trained
    entered = {file for file, _ in calls if not file.startswith("hardware/") and file != "torch"} - {"training/run.py"}
    documented = documented_files(TITLE)
    assert not entered - documented
    assert {file for file, _ in documented_steps(TITLE)[ONE_STEP]} <= entered


def test_validation_goes_through_the_engine(trained):
    recorder, _ = trained
    calls = recorder.calls
    start = calls.index(("training/validate.py", "ndcg"))
    for step in (("engine/engine.py", "step"), ("engine/search.py", "search"), ("data/prompt.py", "build")):
        assert step in calls[start:]
    assert ("engine/search.py", "search") not in calls[:start]
