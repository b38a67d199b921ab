"""Our Qwen3 equals transformers' in logits and gradients, and both read what either saves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers

from polyrec.attention.layout import packed_layout
from polyrec.attention.sdpa import PackedPlan
from polyrec.core.errors import CheckpointError
from polyrec.hardware import get_hardware_backend
from polyrec.hardware.base.attention import PageTable
from polyrec.kvcache.pool import KVPool
from polyrec.models import checkpoint
from polyrec.models.qwen3 import SPEC, read_config


def random_config(rng: np.random.Generator, *, tied: bool, bias: bool) -> transformers.Qwen3Config:
    kv_heads = int(rng.integers(1, 4))
    return transformers.Qwen3Config(
        vocab_size=int(rng.integers(50, 120)),
        hidden_size=16 * int(rng.integers(1, 4)),
        intermediate_size=8 * int(rng.integers(2, 8)),
        num_hidden_layers=int(rng.integers(1, 4)),
        num_attention_heads=kv_heads * int(rng.integers(1, 4)),
        num_key_value_heads=kv_heads,
        head_dim=2 * int(rng.integers(4, 12)),
        tie_word_embeddings=tied,
        attention_bias=bias,
        rope_parameters={"rope_type": "default", "rope_theta": float(rng.choice([1e4, 1e6]))},
        architectures=["Qwen3ForCausalLM"],
    )


def theirs_and_ours(config, folder):
    theirs = transformers.Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_(std=0.3)  # norms and biases too, so that none hides behind a one or a zero
    theirs.save_pretrained(folder)
    return theirs, checkpoint.load_model(folder, get_hardware_backend())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_equal_transformers(seed, tied, tmp_path):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    theirs, ours = theirs_and_ours(random_config(rng, tied=tied, bias=seed % 2 == 1), tmp_path)
    lengths = torch.from_numpy(rng.integers(1, 12, size=3))
    ids = torch.from_numpy(rng.integers(0, theirs.config.vocab_size, size=int(lengths.sum())))
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    hidden = ours(ids, positions, PackedPlan(packed_layout(lengths)))
    logits = hidden @ ours.head_weight.T
    expected = torch.cat([theirs(part[None]).logits[0] for part in ids.split(lengths.tolist())])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)

    weight = torch.randn_like(expected)
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    ours_by_name = gradients(ours)
    for name, parameter in theirs.named_parameters():
        scale = parameter.grad.abs().max()
        torch.testing.assert_close(ours_by_name[name] / scale, parameter.grad / scale, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("seed", range(8))
@torch.inference_mode()
def test_rows_that_are_asked_for_are_those_of_the_whole(seed, tmp_path):
    """With and without a cache; each prompt's last row, the first again and again, any rows, more than there are."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    theirs, ours = theirs_and_ours(random_config(rng, tied=True, bias=seed % 2 == 1), tmp_path)
    ours.eval()
    config, ops = ours.config, get_hardware_backend().ops
    lengths = torch.from_numpy(rng.integers(1, 12, size=int(rng.integers(1, 5))))
    layout = packed_layout(lengths)
    tokens = int(lengths.sum())
    ids = torch.from_numpy(rng.integers(0, config.vocab_size, size=tokens))
    pools = [
        KVPool(config.num_hidden_layers, tokens, config.num_key_value_heads, config.head_dim, torch.float32, ids.device)
        for _ in range(2)
    ]
    whole = ours(ids, layout.positions, PackedPlan(layout, pools[0], ops.kv))
    some = torch.from_numpy(rng.integers(0, tokens, size=tokens + 3))  # more than there are, so some twice
    for rows in (layout.last, torch.cat((layout.last, torch.zeros(3, dtype=torch.int64))), some, some[:1]):
        for plan in (PackedPlan(layout), PackedPlan(layout, pools[1], ops.kv)):
            found = ours(ids, layout.positions, plan, rows)
            assert found.shape == (len(rows), config.hidden_size)
            torch.testing.assert_close(found, whole[rows], rtol=1e-4, atol=1e-4)
    pages = torch.nn.utils.rnn.pad_sequence(torch.arange(tokens).split(lengths.tolist()), True).int()
    paged = dataclasses.replace(layout, table=PageTable(pages, 1, int(lengths.max())))
    plans = PackedPlan(paged, pools[1], ops.kv), PackedPlan(paged.of_last, pools[1], ops.kv)
    found = ours(ids, layout.positions, plans[0], layout.last, plans[1])
    torch.testing.assert_close(found, whole[layout.last], rtol=1e-4, atol=1e-4)
    assert torch.equal(pools[1].keys, pools[0].keys), "every token's, of every layer"
    assert torch.equal(pools[1].values, pools[0].values)
    expected = torch.stack([theirs(part[None]).logits[0, -1] for part in ids.split(lengths.tolist())])
    found = ours(ids, layout.positions, PackedPlan(layout), layout.last) @ ours.head_weight.T
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("rows", [torch.tensor([4, 0, 8, 8]), None])
@torch.inference_mode()
def test_what_follows_the_last_attention_runs_for_the_rows_that_are_asked_for(rows, tmp_path):
    torch.manual_seed(0)
    config = random_config(np.random.default_rng(0), tied=True, bias=False)
    config.num_hidden_layers = 3
    config.layer_types = config.layer_types[:1] * 3
    _, ours = theirs_and_ours(config, tmp_path)
    seen = {}
    for name, module in ours.named_modules():
        module.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: len(given[0])}))
    ours(torch.arange(9), torch.arange(9), PackedPlan(packed_layout(torch.tensor([9]))), rows)
    names = {module: name for name, module in ours.named_modules()}
    inside = {names[part] for module in ours.after_attention for part in module.modules()}
    assert inside == {
        "norm",
        *(f"layers.2.{name}" for name in ("self_attn.o_proj", "post_attention_layernorm", "mlp")),
        *(f"layers.2.mlp.{name}" for name in ("gate_up_proj", "down_proj")),
    }
    assert inside <= seen.keys()
    for name, size in seen.items():
        assert size == (4 if name in inside and rows is not None else 9), name


def gradients(model):
    """Our gradients under Hugging Face's names."""
    with torch.no_grad():
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        views = {name: view.clone() for name, view in checkpoint.hf_views(model, SPEC).items()}
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])
    return views


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_we_save(tied, tmp_path):
    torch.manual_seed(3)
    config = random_config(np.random.default_rng(3), tied=tied, bias=False)
    theirs, ours = theirs_and_ours(config, tmp_path / "theirs")
    checkpoint.save_model(ours, SPEC, tmp_path / "ours")
    again, report = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.arange(7)[None]
    torch.testing.assert_close(again.float()(ids).logits, theirs(ids).logits, rtol=0, atol=0)
    assert read_config(checkpoint.read_config(tmp_path / "ours")) == ours.config


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},  # as older configs spell it
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
        {"rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    ],
)
def test_a_feature_we_lack_is_refused(change):
    values = {**random_config(np.random.default_rng(0), tied=True, bias=False).to_dict(), **change}
    if "rope_scaling" in change:
        values.pop("rope_parameters")
    with pytest.raises(CheckpointError) as error:
        read_config(values)
    assert error.value.code == "model_feature_missing"


def test_a_config_that_does_not_say_whether_the_head_is_tied_means_what_transformers_takes_it_for():
    values = random_config(np.random.default_rng(0), tied=True, bias=False).to_dict()
    del values["tie_word_embeddings"]
    theirs = transformers.Qwen3Config(**values)
    assert read_config(values).tie_word_embeddings == theirs.tie_word_embeddings


def test_weights_that_do_not_fit_are_refused(tmp_path):
    torch.manual_seed(0)
    _, ours = theirs_and_ours(random_config(np.random.default_rng(1), tied=True, bias=False), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "whole.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        checkpoint.load_model(tmp_path, get_hardware_backend())
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "whole.safetensors")
    weights.pop("model.norm.weight")
    save_file({**weights, "model.extra": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 weights missing .*norm.*1 unexpected .*extra"):
        checkpoint.load_model(tmp_path, get_hardware_backend())
    assert ours.config.num_hidden_layers >= 1
