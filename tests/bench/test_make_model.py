"""Synthetic model folders: what transformers and our own loader make of them."""

import numpy as np
import pytest
import torch
import transformers

from polyrec.bench.make_model import SHAPES, make_model, random_catalog, weight_shapes
from polyrec.core.errors import ConfigError
from polyrec.engine.recommender import Recommender
from polyrec.hardware.backends.cpu import CpuBackend
from polyrec.models.qwen3 import Qwen3Config, write_config
from polyrec.sid.catalog import Catalog


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("made"), "tiny", CpuBackend(), num_items=3000, max_items=50, seed=1)


def test_the_folder_recommends(folder):
    recommender = Recommender.from_pretrained(folder)
    answer = recommender.recommend(["item-5", "item-17"], n=20)
    assert len(set(answer.item_ids)) == 20
    assert answer.source == "model"


def test_transformers_reads_the_weights_and_they_are_spread_as_said(folder):
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    gate = model.model.layers[1].mlp.gate_proj.weight.float()
    assert gate.std().item() == pytest.approx(SHAPES["tiny"].spread, rel=0.05)
    assert gate.mean().item() == pytest.approx(0, abs=0.02)
    assert (model.model.norm.weight == 1).all()
    assert not torch.equal(gate, model.model.layers[1].mlp.up_proj.weight.float())


def test_the_seed_makes_the_folder(folder, tmp_path):
    again = make_model(tmp_path / "again", "tiny", CpuBackend(), num_items=3000, max_items=50, seed=1)
    other = make_model(tmp_path / "other", "tiny", CpuBackend(), num_items=3000, max_items=50, seed=2)
    for name in ("model.safetensors", "config.json", "polyrec.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()
    np.testing.assert_array_equal(
        Catalog.load(again / "catalog.parquet").codes, Catalog.load(folder / "catalog.parquet").codes
    )


@pytest.mark.parametrize("name", ["onerec-1.7b", "qwen3-0.6b"])
def test_named_shapes_are_those_of_the_published_models(name):
    """Qwen3's sizes without vocabulary, counted by transformers from its own config."""
    shape = SHAPES[name]
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**write_config(config)))
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items() if key != "lm_head.weight"}
    assert dict(weight_shapes(config)) == expected
    billions = sum(np.prod(sizes) for key, sizes in expected.items() if "embed" not in key) / 1e9
    assert billions == pytest.approx({"onerec-1.7b": 1.41, "qwen3-0.6b": 0.44}[name], abs=0.01)


def test_random_catalogs_fill_what_is_asked_and_no_more():
    catalog = random_catalog((8, 8, 8), 256, 3)
    assert len(np.unique(catalog.codes, axis=0)) == len(catalog) == 256
    assert (catalog.codes.min(), catalog.codes.max()) == (0, 7)
    for num in (0, 257):
        with pytest.raises(ConfigError) as caught:
            random_catalog((8, 8, 8), num, 3)
        assert caught.value.code == "items_out_of_range"


def test_an_unknown_shape_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"onerec-1\.7b") as caught:
        make_model(tmp_path, "onerec-17b", CpuBackend())
    assert caught.value.code == "shape_unknown"
