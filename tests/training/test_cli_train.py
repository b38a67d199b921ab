"""The train command: dry run, config files with faults, reuse, a summary for scripts."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from polyrec.cli.main import build_app
from polyrec.core.errors import ConfigError, DataError, PolyrecError
from polyrec.hardware import process


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    """A command chooses its hardware as if no other test had."""
    monkeypatch.setattr(process, "_chosen", [])


@pytest.fixture
def train(shop, tmp_path, sizes_file):
    """train(*flags, **settings): runs the command with a config file of these settings."""

    def run(*flags, data=shop, **settings):
        values = {
            "model_config_file": str(sizes_file), "steps": 3, "eval_every": 0, "prompt": {"max_items": 8}, **settings,
        }  # fmt: skip
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
        command = ["train", "--data", str(data), "--out", str(tmp_path / "out")]
        return CliRunner().invoke(build_app(), [*command, "--config", str(tmp_path / "recipe.yaml"), *flags])

    return run


def test_dry_run_tells_and_writes_nothing(train, tmp_path):
    result = train("--dry-run", "--learning-rate", "0.02", "--batch-size", "5")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["recipe"]["optim"]["learning_rate"] == 0.02
    assert told["recipe"]["sampling"]["batch_size"] == 5
    assert told["recipe"]["steps"] == told["plan"]["steps"] == 3
    assert told["plan"]["parameters"] > 0
    assert told["plan"]["tokens_per_step"] > 0
    assert not (tmp_path / "out").exists()


def test_a_second_run_reuses_the_first(train, tmp_path):
    first = train("--json")
    assert first.exit_code == 0, first.output
    facts = json.loads(first.stdout)
    assert facts["steps"] == 3
    weights = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    second = train("--json")
    assert "up to date" in second.stderr
    assert json.loads(second.stdout) == facts
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == weights
    other = train("--seed", "1")
    assert isinstance(other.exception, ConfigError)
    assert other.exception.code == "out_has_another_run"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"stepz": 3}, "unknown key 'stepz' (Did you mean 'steps'?)"),
        ({"optim": {"learning_rte": 1}}, "unknown key 'optim.learning_rte' (Did you mean 'learning_rate'?)"),
        ({"sampling": {"batchsize": 1}}, "unknown key 'sampling.batchsize' (Did you mean 'batch_size'?)"),
        ({"steps": "many"}, "'steps'"),
        ({"optim": {"learning_rate": -1}}, "'optim.learning_rate'"),
        ({"optim": 3}, "'optim'"),
        ({"optim": None}, "'optim'"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--learning-rate", "0.1")])
def test_faults_of_a_config_file_are_told(train, tmp_path, settings, told, flags):
    if flags and settings.get("optim") == {"learning_rate": -1}:
        return  # the flag mends it
    result = train(*flags, **settings)
    assert isinstance(result.exception, ConfigError), result.exception
    assert told in result.exception.message
    assert "recipe.yaml" in result.exception.message
    assert not (tmp_path / "out").exists()


def test_patience_on_trained_validation_events_is_refused(train):
    result = train("--fit-on", "fit+validation", "--patience", "2", "--eval-every", "1")
    assert isinstance(result.exception, ConfigError)
    assert "patience" in result.exception.message


def test_a_folder_that_was_not_prepared_is_refused(train, tmp_path):
    for data in (tmp_path / "nowhere", tmp_path):
        result = train(data=data)
        assert isinstance(result.exception, DataError)
        assert result.exception.code == "not_prepared"


def test_a_config_file_that_is_not_there_is_refused(shop, tmp_path):
    command = ["train", "--data", str(shop), "--out", str(tmp_path / "out"), "--config", str(tmp_path / "none.yaml")]
    result = CliRunner().invoke(build_app(), command)
    assert isinstance(result.exception, PolyrecError)
    assert result.exception.code == "config_missing"


@pytest.mark.parametrize("other", ["--model-config-file", "--init-from"])
def test_a_size_beside_a_models_own_config_is_refused(train, tmp_path, other):
    result = train("--size", "small", other, str(tmp_path))
    assert isinstance(result.exception, ConfigError), result.exception
    assert result.exception.code == "size_unused"
