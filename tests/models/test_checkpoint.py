"""Loading and saving model folders: shards, tied heads, dtypes, and folders that cannot be loaded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from polyrec.core.errors import CheckpointError, PolyrecError
from polyrec.hardware import HardwareConfig, build_hardware_backend, get_hardware_backend
from polyrec.hardware.ops.spec import op_claims
from polyrec.hardware.table import resolve
from polyrec.models import checkpoint
from polyrec.models.qwen3 import SPEC
from polyrec.models.registry import model_spec

BACKEND = get_hardware_backend()


def theirs(folder, *, tied=True, **save):
    """A transformers checkpoint in `folder`, written by transformers."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        attention_bias=True,
        architectures=["Qwen3ForCausalLM"],
    )
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    model.save_pretrained(folder, **save)
    return model


def expect_weights(ours, model, cast=None):
    """Every weight of theirs, under its name, stands in ours."""
    views = checkpoint.hf_views(ours, SPEC)
    expected = dict(model.named_parameters())  # a tied head appears once
    assert set(views) == set(expected)
    for name, weight in expected.items():
        wanted = weight.to(cast).float() if cast else weight
        assert torch.equal(views[name], wanted), name


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_folder(tied, tmp_path):
    model = theirs(tmp_path, tied=tied, max_shard_size="6KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ours = checkpoint.load_model(tmp_path, BACKEND)
    expect_weights(ours, model)
    assert not ours.training
    assert (ours.head_weight is ours.embed_tokens.weight) == tied


def test_a_missing_shard_is_named(tmp_path):
    theirs(tmp_path, max_shard_size="6KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name) as error:
        checkpoint.load_model(tmp_path, BACKEND)
    assert error.value.code == "weights_missing"


def test_a_tied_head_written_out_is_accepted(tmp_path):
    model = theirs(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    expect_weights(checkpoint.load_model(tmp_path, BACKEND), model)


def test_an_untied_head_must_be_there(tmp_path):
    theirs(tmp_path, tied=False)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight") as error:
        checkpoint.load_model(tmp_path, BACKEND)
    assert error.value.code == "weights_do_not_fit"


def test_half_precision_file_into_an_fp32_model(tmp_path):
    model = theirs(tmp_path)
    weights = {name: weight.bfloat16() for name, weight in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    ours = checkpoint.load_model(tmp_path, BACKEND)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    expect_weights(ours, model, cast=torch.bfloat16)


def test_loading_in_half_precision(tmp_path):
    theirs(tmp_path)
    ours = checkpoint.load_model(tmp_path, BACKEND, torch.bfloat16)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("tied", [True, False])
def test_saving_gives_back_the_same_file(tied, tmp_path):
    theirs(tmp_path / "theirs", tied=tied)
    ours = checkpoint.load_model(tmp_path / "theirs", BACKEND)
    checkpoint.save_model(ours, SPEC, tmp_path / "ours")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert set(before) == set(after)
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]


def test_a_weight_of_another_shape_names_both(tmp_path):
    theirs(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "intermediate_size": 32}))
    with pytest.raises(CheckpointError, match=r"\[16, 24\].*\[16, 32\]") as error:
        checkpoint.load_model(tmp_path, BACKEND)
    assert error.value.code == "weight_shape"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(tmp_path, value, dtype):
    theirs(tmp_path)
    weights = {name: weight.to(dtype) for name, weight in load_file(tmp_path / "model.safetensors").items()}
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name][3, 5] = value
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=name) as error:
        checkpoint.load_model(tmp_path, BACKEND)
    assert error.value.code == "weights_not_finite"


def test_no_config(tmp_path):
    theirs(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json") as error:
        checkpoint.load_model(tmp_path, BACKEND)
    assert error.value.code == "config_json_missing"


def test_a_broken_config_is_an_error_for_users(tmp_path):
    theirs(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(PolyrecError, match=r"config\.json"):
        checkpoint.load_model(tmp_path, BACKEND)


@pytest.mark.parametrize("names", [[], None, ["Qwen3ForCausalLM", "LlamaForCausalLM"]], ids=["none", "absent", "two"])
def test_one_architecture_is_needed(names):
    with pytest.raises(CheckpointError) as error:
        model_spec({"architectures": names}, "some/config.json")
    assert error.value.code == "architecture_missing"
    assert "some/config.json" in str(error.value)


def test_an_unknown_architecture_gets_the_closest_name():
    with pytest.raises(PolyrecError, match="Did you mean 'Qwen3ForCausalLM'") as error:
        model_spec({"architectures": ["Qwen2ForCausalML"]}, "config.json")
    assert error.value.code == "model_unknown"


def limited(dtypes, *fields):
    """The CPU platform with implementations that take only `dtypes`."""
    backend = build_hardware_backend(HardwareConfig(hardware_platform="cpu"))
    ops = backend.ops
    for field in fields:
        group, _, name = field.partition(".")
        function = getattr(getattr(ops, group), name)
        own = op_claims(dtypes=dtypes)(lambda *args, function=function: function(*args))
        ops = replace(ops, **{group: replace(getattr(ops, group), **{name: own})})
    backend.table = resolve(type(backend), ops, {}, "warn", "infer")
    return backend


def test_a_dtype_that_an_operation_does_not_take_is_refused(tmp_path):
    theirs(tmp_path)
    backend = limited((torch.bfloat16,), "norm.rms_norm", "act.silu_and_mul")
    with pytest.raises(PolyrecError, match=r"float32.*norm\.rms_norm.*bfloat16.*act\.silu_and_mul") as caught:
        checkpoint.load_model(tmp_path, backend)
    assert caught.value.code == "op_dtype_unsupported"
    assert next(checkpoint.load_model(tmp_path, backend, torch.bfloat16).parameters()).dtype == torch.bfloat16


def test_optional_operations_refuse_no_dtype(tmp_path):
    theirs(tmp_path)
    assert checkpoint.load_model(tmp_path, limited((torch.bfloat16,), "act.gelu_and_mul"))
