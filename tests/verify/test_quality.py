"""The row that holds a model in fp8 against itself: it passes where quantising is right, and fails where a scale is wrong."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from polyrec.core.errors import ConfigError
from polyrec.engine import recommender
from polyrec.hardware import get_hardware_backend
from polyrec.models.checkpoint import hf_views, load_model
from polyrec.models.options import ModelOptions
from polyrec.models.qwen3 import SPEC
from polyrec.testing.tiny import write_tiny_model
from polyrec.verify.quality import fp8_row, overlap

BACKEND = get_hardware_backend()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Random weights whose output channels differ in size, as trained ones do."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, weight in weights.items():
        if "_proj" in name:
            weight *= torch.randn(len(weight), 1, generator=generator).exp()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def fp8(plain, tmp_path_factory):
    """`plain` as a checkpoint with e4m3 weights; scales(name, numbers) may change what is written."""

    def write(scales=lambda name, numbers: numbers):
        folder = tmp_path_factory.mktemp("fp8") / "model"
        shutil.copytree(plain, folder)
        views = hf_views(load_model(plain, BACKEND, options=ModelOptions(quantization="fp8")), SPEC)
        views = {name: scales(name, view) if name.endswith("_scale") else view for name, view in views.items()}
        save_file({name: view.detach().clone() for name, view in views.items()}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "quantization_config": {"quant_method": "fbgemm_fp8"}})
        )
        return folder

    return write


def test_quantising_a_model_keeps_its_beams(plain):
    row = fp8_row(plain, BACKEND, users=40)
    assert row.passed
    assert 0.85 < row.measures["overlap"] < 1  # it does change something
    assert row.measures["ndcg_plain"] == pytest.approx(1)  # its own best are the targets
    assert row.measures["ndcg_kept"] == pytest.approx(row.measures["ndcg_fp8"])
    assert row.to_dict()["passed"]
    assert fp8_row(plain, BACKEND, users=40) == row


def test_each_model_is_held_against_the_device_before_its_weights_are_read(plain, monkeypatch):
    seen = []
    monkeypatch.setattr(recommender, "check_fits", lambda model, **more: seen.append(model.head_weight.is_meta))
    fp8_row(plain, BACKEND, users=2)
    assert seen == [True, True]


def test_a_quantised_checkpoint_is_held_against_the_plain_one(plain, fp8):
    assert fp8_row(fp8(), BACKEND, reference=plain, users=40).measures == fp8_row(plain, BACKEND, users=40).measures


def test_a_scale_of_another_channel_is_seen(plain, fp8):
    broken = fp8(lambda name, numbers: numbers.roll(1, 0) if "down_proj" in name else numbers)
    row = fp8_row(broken, BACKEND, reference=plain, users=40)
    assert not row.passed
    assert row.measures["overlap"] < row.limits["overlap"]
    assert row.measures["ndcg_kept"] < row.limits["ndcg_kept"]


def test_a_quantised_checkpoint_alone_has_nothing_to_be_held_against(fp8):
    folder = fp8()
    for code, reference in (("reference_missing", None), ("reference_quantised", folder)):
        with pytest.raises(ConfigError) as caught:
            fp8_row(folder, BACKEND, reference=reference, users=4)
        assert caught.value.code == code


def test_a_model_that_runs_plain_has_nothing_to_verify(plain):
    with pytest.raises(ConfigError) as caught:
        fp8_row(plain, BACKEND, options=ModelOptions(quantization="none"))
    assert caught.value.code == "nothing_to_verify"


def test_overlap():
    expected = np.array([[0, 1, 2, 3], [4, 5, -1, -1], [-1, -1, -1, -1]])
    found = np.array([[3, 2, 9, 8], [5, 4, -1, -1], [-1, -1, -1, -1]])
    assert overlap(found, expected) == pytest.approx((0.5 + 1 + 1) / 3)
