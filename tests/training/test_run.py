"""A whole run in this process: what it writes, when it is reused or refused, early stopping, what transformers makes of it."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from small_shop import read_log

from polyrec.core.config import make_settings
from polyrec.core.errors import ConfigError, PolyrecError, TrainingError
from polyrec.core.files import read_json, write_json
from polyrec.data.histories import known_before
from polyrec.engine.recommender import Recommender
from polyrec.models.checkpoint import hf_views, load_model
from polyrec.models.qwen3 import SPEC
from polyrec.sid.catalog import Catalog
from polyrec.training import run
from polyrec.training.recipe import TrainConfig
from polyrec.training.validate import Validator


@pytest.fixture(scope="module")
def trained(data, backend, sizes_file, tmp_path_factory):
    """A finished run of 12 steps with validation."""
    config = TrainConfig(
        model_config_file=str(sizes_file), steps=12, eval_every=5, checkpoint_every=4, prompt={"max_items": 8}
    )
    out = tmp_path_factory.mktemp("trained") / "model"
    started = []
    run.train(data, out, config, backend, events=run.RunEvents(on_start=lambda *steps: started.append(steps)))
    assert started == [(0, 12)]
    return out, config


def weights_of(out):
    return load_file(out / "model.safetensors")


def expect_equal(one, other):
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_the_folder_is_whole_and_says_what_made_it(trained, data, backend):
    out, config = trained
    assert {path.name for path in out.iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "polyrec.json",
        "catalog.parquet", "codebooks.safetensors", "run",
    }  # fmt: skip
    assert make_settings(TrainConfig, yaml.safe_load((out / "run" / "recipe.yaml").read_text())) == config
    provenance = read_json(out / "run" / "provenance.json")
    assert provenance["seed"] == config.seed
    assert provenance["data_digest"] == data.facts["data_digest"]
    assert {"polyrec", "torch", "numpy", "python"} <= set(provenance)
    facts = read_json(out / "polyrec.json")
    assert facts["sid_layout"] == data.layout.to_dict()
    assert facts["prompt"] == {"config": config.prompt.model_dump(), "digest": config.prompt.digest}
    assert facts["catalog_fingerprint"] == data.facts["fingerprint"]
    catalog = Catalog.load(out / "catalog.parquet")
    np.testing.assert_array_equal(catalog.codes, data.catalog.codes)
    fit = known_before(data.histories, "validation").items
    np.testing.assert_array_equal(catalog.counts, np.bincount(fit, minlength=len(catalog)))
    answer = Recommender.from_pretrained(out, backend=backend).recommend(["i1", ["i2", "i3"]], n=7)
    assert len(set(answer.item_ids)) == 7


def test_the_log_tells_every_step_and_validation(trained):
    out, _ = trained
    lines = read_log(out)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert all(math.isfinite(line["loss"]) and len(line["loss_by_level"]) == 3 for line in steps)
    assert [line["step"] for line in lines if "validation_ndcg@10" in line] == [5, 10, 12]
    assert list((out / "run" / "tensorboard").glob("events.*"))
    kept = sorted(path.name for path in (out / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000008", "step-00000012"]
    finished = read_json(out / "run" / "finished.json")
    assert finished["steps"] == 12
    assert finished["best_validation"]["ndcg@10"] == max(line.get("validation_ndcg@10", -1) for line in lines)


def test_transformers_reads_the_folder_and_agrees(trained, backend, data):
    from polyrec.attention.layout import packed_layout
    from polyrec.attention.sdpa import PackedPlan

    out, _ = trained
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    codes = data.catalog.codes[:6]
    text = "<|sid_begin|>" + "".join(data.layout.text(sid) for sid in codes) + "<|sid_begin|>"
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    expected = [data.layout.begin, *data.layout.tokens(codes).reshape(-1).tolist(), data.layout.begin]
    assert ids.tolist() == expected
    assert tokenizer.decode(ids) == text
    ours = load_model(out, backend)
    hidden = ours(ids, torch.arange(len(ids)), PackedPlan(packed_layout(torch.tensor([len(ids)]))))
    torch.testing.assert_close(hidden @ ours.head_weight.T, theirs(ids[None]).logits[0], rtol=1e-4, atol=1e-5)


def test_a_finished_run_is_reused(trained, data, backend):
    out, config = trained
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    events = run.RunEvents(on_start=lambda *_: pytest.fail("trained again"))
    assert run.is_finished(data, out, config)
    assert run.train(data, out, config, backend, events=events) == out
    looks_more_often = config.model_copy(update={"checkpoint_every": 3, "keep_checkpoints": 1})
    assert run.is_finished(data, out, looks_more_often), "how often one saves changes no model"
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before


def test_another_recipe_in_the_same_folder_is_refused(trained, data, backend, recipe):
    out, config = trained
    before = (out / "model.safetensors").read_bytes()
    for other in (config.model_copy(update={"seed": 1}), config.model_copy(update={"steps": 13})):
        assert not run.is_finished(data, out, other)
        with pytest.raises(ConfigError) as error:
            run.train(data, out, other, backend)
        assert error.value.code == "out_has_another_run"
        assert "--force" in error.value.remedy
    assert (out / "model.safetensors").read_bytes() == before


def test_force_trains_another_recipe_anew(data, backend, recipe, tmp_path):
    first, second = recipe(steps=2), recipe(steps=3, seed=1)
    run.train(data, tmp_path / "a", first, backend)
    run.train(data, tmp_path / "a", second, backend, force=True)
    run.train(data, tmp_path / "b", second, backend)
    expect_equal(weights_of(tmp_path / "a"), weights_of(tmp_path / "b"))
    assert [line["step"] for line in read_log(tmp_path / "a")] == [1, 2, 3]


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_something_else_is_refused(data, backend, recipe, tmp_path, force):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("…")
    (tmp_path / "file").write_text("…")
    for out in (tmp_path / "letters", tmp_path / "file"):
        with pytest.raises(ConfigError) as error:
            run.train(data, out, recipe(), backend, force=force)
        assert error.value.code == "out_occupied"
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["dear.txt"]


def test_a_deleted_model_is_written_again(data, backend, recipe, tmp_path):
    config = recipe(steps=3)
    run.train(data, tmp_path / "out", config, backend)
    before = weights_of(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    run.train(data, tmp_path / "out", config, backend)
    expect_equal(weights_of(tmp_path / "out"), before)


WRITERS = ("save_tokenizer", "Catalog", "shutil", "write_facts", "save_model", "write_json")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("over_another", [False, True])
def test_a_model_folder_written_by_half_does_not_load(
    data, backend, recipe, tmp_path, monkeypatch, writer, over_another
):
    """Killed before any of its files: no weights without what says how to read them, none beside another run's facts."""
    out, config = tmp_path / "out", recipe(steps=2, prompt={"max_items": 6, "basket_token": False})
    if over_another:
        run.train(data, out, recipe(steps=1), backend)

    def killed(*_, **__):
        raise KeyboardInterrupt

    write_model = run._write_model

    def write_until_killed(*given):
        owner, name = (shutil, "copyfile") if writer == "shutil" else (run, writer)
        patch.setattr(owner, name, killed)
        write_model(*given)

    with monkeypatch.context() as patch:
        patch.setattr(run, "_write_model", write_until_killed)
        with pytest.raises(KeyboardInterrupt):
            run.train(data, out, config, backend, force=over_another)
    assert not run.is_finished(data, out, config)
    if writer == "write_json":  # the mark of a finished run: by then all is there
        assert Recommender.from_pretrained(out, backend=backend).front.prompts.config == config.prompt
    else:
        with pytest.raises(PolyrecError):
            Recommender.from_pretrained(out, backend=backend)
    run.train(data, out, config, backend)
    run.train(data, tmp_path / "quiet", config, backend)
    expect_equal(weights_of(out), weights_of(tmp_path / "quiet"))


@pytest.mark.parametrize("settings", [{"prompt": {"max_items": 200}}, {"patience": 1, "eval_every": 1}])
def test_a_refused_recipe_does_not_claim_the_folder(data, backend, recipe, tmp_path, monkeypatch, settings):
    with monkeypatch.context() as patch:
        patch.setattr(Validator, "__len__", lambda self: 0)
        with pytest.raises(PolyrecError):
            run.train(data, tmp_path / "out", recipe(**settings), backend)
    assert not (tmp_path / "out").exists()
    run.train(data, tmp_path / "out", recipe(steps=1), backend)


def test_a_config_file_that_changed_makes_another_run(data, backend, recipe, sizes_file, tmp_path):
    mine = tmp_path / "config.json"
    shutil.copyfile(sizes_file, mine)
    config = recipe(steps=1, model_config_file=str(mine))
    run.train(data, tmp_path / "out", config, backend)
    assert run.is_finished(data, tmp_path / "out", config)
    write_json(mine, read_json(mine) | {"hidden_size": 24})
    assert not run.is_finished(data, tmp_path / "out", config)
    with pytest.raises(ConfigError) as error:
        run.train(data, tmp_path / "out", config, backend)
    assert error.value.code == "out_has_another_run"


def test_a_run_killed_before_its_first_file_starts_again(data, backend, recipe, tmp_path):
    (tmp_path / "out" / "run").mkdir(parents=True)
    (tmp_path / "out" / "run" / ".recipe.half.yaml").write_text("siz")
    run.train(data, tmp_path / "out", recipe(steps=1), backend)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_model_folder_without_its_run_is_replaced_by_force_only(data, backend, recipe, tmp_path):
    """Copied without `run/`, or left by a process that was killed just after --force had removed it."""
    config = recipe(steps=2)
    run.train(data, tmp_path / "out", config, backend)
    before = weights_of(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "run")
    with pytest.raises(ConfigError) as error:
        run.train(data, tmp_path / "out", config, backend)
    assert error.value.code == "out_occupied"
    run.train(data, tmp_path / "out", config, backend, force=True)
    expect_equal(weights_of(tmp_path / "out"), before)
    assert run.is_finished(data, tmp_path / "out", config)


class Scripted:
    """Replaces a run's validations: given scores, and the weights at each."""

    def __init__(self, monkeypatch, scores):
        self.weights = []

        def ndcg(validator):
            self.weights.append({k: v.clone() for k, v in hf_views(validator._model, SPEC).items()})
            return scores[len(self.weights) - 1]

        monkeypatch.setattr(Validator, "ndcg", ndcg)


SCORES = [0.1, 0.3, 0.2, 0.25, 0.9]


def test_early_stopping_keeps_the_best_weights(data, backend, recipe, tmp_path, monkeypatch):
    scripted = Scripted(monkeypatch, SCORES)
    config = recipe(steps=10, eval_every=2, patience=2, checkpoint_every=3)
    run.train(data, tmp_path / "out", config, backend)
    assert len(scripted.weights) == 4, "stopped after two validations without a better one"
    finished = read_json(tmp_path / "out" / "run" / "finished.json")
    assert finished["best_validation"] == {"step": 4, "ndcg@10": 0.3}
    assert finished["steps"] == 8
    expect_equal(weights_of(tmp_path / "out"), scripted.weights[1])


def test_without_patience_the_last_weights_stay(data, backend, recipe, tmp_path, monkeypatch):
    scripted = Scripted(monkeypatch, SCORES)
    run.train(data, tmp_path / "out", recipe(steps=10, eval_every=2), backend)
    assert len(scripted.weights) == 5
    expect_equal(weights_of(tmp_path / "out"), scripted.weights[-1])


@pytest.mark.parametrize("stopped_after", [3, 5, 8])
def test_early_stopping_survives_an_interruption(data, backend, recipe, tmp_path, monkeypatch, stopped_after):
    """Before the best was seen, after it, and between the early stop and the model folder."""
    config = recipe(steps=10, eval_every=2, patience=2, checkpoint_every=1)
    whole = Scripted(monkeypatch, SCORES)
    run.train(data, tmp_path / "whole", config, backend)
    with monkeypatch.context() as patch:
        before = Scripted(patch, SCORES)

        def interrupt(*_):
            raise KeyboardInterrupt

        if stopped_after == 8:
            patch.setattr(run, "_write_model", interrupt)
        events = run.RunEvents(on_step=lambda facts: interrupt() if facts.step == stopped_after + 1 else None)
        with pytest.raises(KeyboardInterrupt):
            run.train(data, tmp_path / "out", config, backend, events=events)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    after = Scripted(monkeypatch, SCORES[len(before.weights) :])
    run.train(data, tmp_path / "out", config, backend)
    assert len(before.weights) + len(after.weights) == len(whole.weights) == 4
    expect_equal(weights_of(tmp_path / "out"), weights_of(tmp_path / "whole"))
    losses = [[line["loss"] for line in read_log(tmp_path / name) if "loss" in line] for name in ("whole", "out")]
    assert losses[0] == losses[1]


def test_a_run_stops_at_a_gradient_that_is_not_finite(data, backend, recipe, tmp_path, monkeypatch):
    config = recipe(steps=6, checkpoint_every=2)
    from polyrec.training.objective import Objective

    plain, calls = Objective.__call__, []

    def poisoned(self, model, batch):
        calls.append(batch)
        loss = plain(self, model, batch)
        return loss._replace(mean=loss.mean * float("nan")) if len(calls) == 4 else loss

    monkeypatch.setattr(Objective, "__call__", poisoned)
    with pytest.raises(TrainingError, match="Step 4"):
        run.train(data, tmp_path / "out", config, backend)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    monkeypatch.undo()
    run.train(data, tmp_path / "out", config, backend)
    run.train(data, tmp_path / "whole", config, backend)
    expect_equal(weights_of(tmp_path / "out"), weights_of(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fit_on": "fit+validation", "patience": 2, "eval_every": 2}, "patience"),
        ({"patience": 2, "eval_every": 0}, "eval_every"),
        ({"size": "huge", "model_config_file": None}, "tiny"),
        ({"init_from": "somewhere"}, "not both"),
        ({"learning_rte": 1}, "learning_rte"),
    ],
)
def test_contradictions_are_refused(recipe, settings, told):
    with pytest.raises(ConfigError, match=told):
        recipe(**settings)


def test_early_stopping_without_anybody_to_ask_is_refused(data, backend, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(Validator, "__len__", lambda self: 0)
    with pytest.raises(PolyrecError) as error:
        run.train(data, tmp_path / "out", recipe(patience=1, eval_every=1), backend)
    assert error.value.code == "nobody_to_validate"


@pytest.mark.parametrize(("fit_on", "stage"), [("fit", "validation"), ("fit+validation", "test")])
def test_the_loader_gets_only_what_may_be_seen(data, backend, recipe, tmp_path, monkeypatch, fit_on, stage):
    given = []

    class Spy(run.ExampleLoader):
        def __init__(self, histories, *rest):
            given.append(histories)
            super().__init__(histories, *rest)

    monkeypatch.setattr(run, "ExampleLoader", Spy)
    run.train(data, tmp_path / "out", recipe(fit_on=fit_on, steps=1), backend)
    expected = known_before(data.histories, stage)
    assert len(given) == 1
    np.testing.assert_array_equal(given[0].items, expected.items)
    np.testing.assert_array_equal(given[0].offsets, expected.offsets)
    counts = Catalog.load(tmp_path / "out" / "catalog.parquet").counts
    np.testing.assert_array_equal(counts, np.bincount(expected.items, minlength=len(counts)))


def test_a_torn_log_line_is_dropped(tmp_path):
    """A process killed while it wrote its log leaves half a line."""
    whole = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}, {"step": 3, "loss": 1.0}]
    text = "".join(json.dumps(line) + "\n" for line in whole)
    (tmp_path / "log.jsonl").write_text(text + '{"step": 4, "loss_by_le')
    with run._Log(tmp_path, 2) as log:
        log.validation(2, 0.5)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [*whole[:2], {"step": 2, "validation_ndcg@10": 0.5}]


def test_plugins_are_asked_about_once_after_the_first_step(data, recipe, backend, tmp_path, monkeypatch):
    asked, steps = [], []
    monkeypatch.setattr(run, "report_never_called", asked.append)
    events = run.RunEvents(on_step=lambda facts: steps.append((facts.step, len(asked))))
    run.train(data, tmp_path / "out", recipe(steps=3), backend, events=events)
    assert asked == [backend]
    assert steps == [(1, 0), (2, 1), (3, 1)]
