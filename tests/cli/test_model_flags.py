"""The flags that say how a model runs: one set of defaults, and they reach the model that is loaded."""

from __future__ import annotations

import inspect
import json

import pytest
import typer
from typer.testing import CliRunner

from polyrec import Recommender
from polyrec.cli.main import build_app
from polyrec.cli.model_flags import model_flags
from polyrec.core.errors import ConfigError, PolyrecError
from polyrec.models.options import ModelOptions
from polyrec.server import launch
from polyrec.testing.tiny import write_tiny_model

ALL = {
    "dtype": "bfloat16",
    "quantization": "fp8",
    "enable_fused_rms_fp8": False,
    "enable_fused_silu_fp8": False,
    "enable_fused_qk_rope_kv": False,
}
FLAGS = ["--dtype", "bfloat16", "--quantization", "fp8"]
FLAGS += ["--no-fused-rms-fp8", "--no-fused-silu-fp8", "--no-fused-qk-rope-kv"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def test_every_option_has_a_flag():
    parameters = inspect.signature(model_flags(lambda *, options: None)).parameters
    assert set(parameters) == set(ModelOptions.model_fields) == set(ALL)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ModelOptions()),
        (FLAGS, ModelOptions(**ALL)),
        (["--enable-fused-rms-fp8", "--enable_fused_silu_fp8"], ModelOptions()),
    ],
)
def test_flags_reach_their_options(flags, expected):
    seen = []
    app = typer.Typer(context_settings=dict(build_app().info.context_settings))

    @app.command()
    @model_flags
    def command(*, options: ModelOptions) -> None:
        """A command."""
        seen.append(options)

    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert seen == [expected]


def test_recommend_runs_a_model_as_told(polyrec, folder):
    plain, fp8 = (
        json.loads(polyrec("recommend", folder, "--history", "item-1,item-2", "--json", *flags).stdout)["items"]
        for flags in ([], ["--quantization", "fp8"])
    )
    assert len(plain) == len(fp8) == 10
    assert [item["score"] for item in plain] != [item["score"] for item in fp8]


def test_serve_hands_them_to_the_server(polyrec, folder, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "run_server", lambda folder, settings: seen.append(settings.model))
    monkeypatch.setattr("polyrec.server.logs.configure_logs", lambda level: None)
    assert polyrec("serve", folder, *FLAGS).exit_code == 0
    assert seen == [ModelOptions(**ALL)]


def test_evaluate_takes_them_with_a_model_only(polyrec, tmp_path):
    with pytest.raises(ConfigError) as caught:
        polyrec("evaluate", "--data", tmp_path, "--quantization", "fp8")
    assert caught.value.code == "flag_unused"
    assert "--quantization" in str(caught.value)


def test_from_pretrained_takes_them_too(folder):
    weights = {
        quantization: Recommender.from_pretrained(folder, quantization=quantization).recommend(["item-1"], 5)
        for quantization in ("auto", "none", "fp8")
    }
    assert weights["auto"] == weights["none"] != weights["fp8"]
    with pytest.raises(PolyrecError) as caught:
        Recommender.from_pretrained(folder, quantization="int4")
    assert caught.value.code == "config_invalid"
