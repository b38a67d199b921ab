"""Quantised checkpoints and quantising at load: what is read, what it means, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from e4m3 import decode
from safetensors.torch import load_file, save_file

from polyrec.attention.layout import packed_layout
from polyrec.attention.sdpa import PackedPlan
from polyrec.core.errors import CheckpointError, PolyrecError
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.hardware.ops.linear import QuantizedRows, quantize_fp8
from polyrec.hardware.ops.norm import mm_add_rms_norm_fp8
from polyrec.hardware.ops.spec import MISSING
from polyrec.hardware.plugin.source import PluginSource
from polyrec.hardware.table import Replacement, resolve
from polyrec.layers.linear import Fp8BlockLinear, Fp8Linear, Linear
from polyrec.models import checkpoint
from polyrec.models.options import ModelOptions
from polyrec.models.qwen3 import SPEC

CPU = build_hardware_backend(HardwareConfig(hardware_platform="cpu"))
PER_CHANNEL = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
PER_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GROUP = {
    "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
    "input_activations": {"dynamic": True, "strategy": "token"},
}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}, "ignore": ["lm_head"]}


def write(folder, *, dtype=torch.float32, hidden=32, intermediate=48, head_dim=16):
    """A random Qwen3 as transformers saves it; some projections are much larger than their neighbours in the merged one."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=40,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.3 * (20 if "k_proj" in name or "up_proj" in name else 1))
    model.to(dtype).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def quantised(folder, given, scale, **sizes):
    """Rewrites the folder's projections as random e4m3 numbers; scale: weight shape -> (suffix, its scale)."""
    weights = write(folder, **sizes)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in weights if "_proj.weight" in name]:
        shape = weights[name].shape
        weights[name] = (torch.randn(shape, generator=generator) * 60).to(torch.float8_e4m3fn)
        suffix, numbers = scale(shape)
        weights[f"{name}_{suffix}"] = numbers
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config=given)
    return weights


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def uniform(*shape):
    return torch.empty(shape).uniform_(0.0005, 0.002, generator=torch.Generator().manual_seed(2))


SCALES = {
    "[out, 1]": (PER_CHANNEL, lambda shape: ("scale", uniform(shape[0], 1))),
    "[out]": (PER_CHANNEL, lambda shape: ("scale", uniform(shape[0]))),
    "[out, 1] in bf16": (COMPRESSED, lambda shape: ("scale", uniform(shape[0], 1).bfloat16())),
    "one": ({"quant_method": "fp8"}, lambda shape: ("scale_inv", torch.tensor(0.0013))),
}


def loaded(folder, *, backend=CPU, dtype=None, **options):
    return checkpoint.load_model(folder, backend, dtype, ModelOptions(**options))


def hidden_states(model, rows=None):
    with torch.inference_mode():
        return model(torch.arange(9), torch.arange(9), PackedPlan(packed_layout(torch.tensor([9]))), rows).double()


def kinds(model):
    """The kinds of the decoder layers' products."""
    return {type(module) for name, module in model.layers.named_modules() if name.endswith("proj")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantising_at_load_gives_every_output_channel_its_own_scale(tmp_path, dtype):
    weights = write(tmp_path, dtype=dtype)
    model = loaded(tmp_path, quantization="fp8")
    views = checkpoint.hf_views(model, SPEC)
    assert kinds(model) == {Fp8Linear}
    for name in (name for name in weights if "_proj.weight" in name):
        exact = weights[name].double().numpy()
        scale = views[f"{name}_scale"].double().numpy()
        np.testing.assert_allclose(scale[:, 0], np.abs(exact).max(1) / 448, rtol=1e-6)
        found = decode(views[name]) * scale
        assert (np.abs(found - exact) <= np.abs(exact) / 15 + scale * 2**-10).all(), name
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_norm.weight"):
        assert torch.equal(views[name], weights[name].float())


class Quantising(PackedPlan):
    """Gives what a kernel would that quantises the results it merges."""

    def run(self, layer, query, key, value):
        return QuantizedRows(*quantize_fp8(super().run(layer, query, key, value)))


@pytest.mark.parametrize("rows", [None, torch.tensor([8, 0])])
def test_attention_may_quantise_its_results(tmp_path, rows):
    write(tmp_path)
    assert not loaded(tmp_path).attention_needs(torch.float32).quantized
    model, expected = loaded(tmp_path, quantization="fp8"), None
    assert model.attention_needs(torch.float32).quantized
    for kind in (PackedPlan, Quantising):
        plan = kind(packed_layout(torch.tensor([9])))
        with torch.inference_mode():
            found = model(torch.arange(9), torch.arange(9), plan, rows)
        assert expected is None or torch.equal(found, expected)
        expected = found


@pytest.mark.parametrize("scales", SCALES)
def test_a_quantised_checkpoint_is_used_as_it_is(tmp_path, scales):
    given, scale = SCALES[scales]
    stored = quantised(tmp_path, given, scale)
    views = checkpoint.hf_views(loaded(tmp_path), SPEC)
    for name in (name for name in stored if name.endswith("_proj.weight")):
        assert torch.equal(views[name].view(torch.uint8), stored[name].view(torch.uint8)), name
        numbers = stored.get(f"{name}_scale", stored.get(f"{name}_scale_inv")).float()
        expected = numbers.reshape(-1, 1).expand(len(stored[name]), 1)
        assert torch.equal(views[f"{name}_scale"], expected), name


@pytest.mark.parametrize("scales", SCALES)
def test_a_quantised_checkpoint_means_its_weights_times_their_scales(tmp_path, scales):
    given, scale = SCALES[scales]
    stored = quantised(tmp_path / "fp8", given, scale)
    expect_like_plain(tmp_path, stored, 1)


def expect_like_plain(tmp_path, stored, block):
    """The same as with plain weights of the same values, but for the rounding of activations."""
    plain = {name: weight.float() for name, weight in stored.items() if "weight_scale" not in name}
    for name in (name for name in stored if name.endswith("_proj.weight")):
        numbers = stored.get(f"{name}_scale", stored.get(f"{name}_scale_inv")).double().numpy()
        if block > 1:
            numbers = numbers.repeat(block, 0).repeat(block, 1)[: len(plain[name])]
        elif numbers.ndim == 1:
            numbers = numbers[:, None]
        plain[name] = torch.from_numpy(decode(stored[name]) * numbers).float()
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    expected, found = hidden_states(loaded(tmp_path / "plain")), hidden_states(loaded(tmp_path / "fp8"))
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.1


def test_scales_of_blocks(tmp_path):
    def scale(shape):
        return "scale_inv", uniform(-(-shape[0] // 128), shape[1] // 128)

    stored = quantised(tmp_path / "fp8", PER_BLOCK, scale, hidden=256, intermediate=384, head_dim=128)
    model = loaded(tmp_path / "fp8")
    assert kinds(model) == {Fp8BlockLinear}
    views = checkpoint.hf_views(model, SPEC)
    for name in (name for name in stored if name.endswith("_proj.weight")):
        assert torch.equal(views[name].view(torch.uint8), stored[name].view(torch.uint8))
        assert torch.equal(views[f"{name}_scale"], stored[f"{name}_scale_inv"])
    expect_like_plain(tmp_path, stored, 128)


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_a_folder_called_fp8_proves_nothing(tmp_path, quantization):
    write(tmp_path / "Qwen3-1.7B-FP8")
    assert kinds(loaded(tmp_path / "Qwen3-1.7B-FP8", quantization=quantization)) == {Linear}


@pytest.mark.parametrize("form", ["at load", "blocks"])
@pytest.mark.parametrize("off", [{}, {"enable_fused_rms_fp8": False, "enable_fused_silu_fp8": False}])
def test_rows_that_are_asked_for_are_those_of_the_whole(tmp_path, form, off):
    """Attention's rows are taken before they are quantised; each row has a scale of its own, so nothing else changes."""
    if form == "at load":
        write(tmp_path)
        model = loaded(tmp_path, quantization="fp8", **off)
    else:

        def scale(shape):
            return "scale_inv", uniform(*(-(-size // 128) for size in shape))

        quantised(tmp_path, PER_BLOCK, scale, hidden=256, intermediate=384, head_dim=128)
        model = loaded(tmp_path, **off)
    sizes = []
    model.layers[-1].self_attn.o_proj.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    rows, whole = torch.tensor([8, 3, 3, 0]), hidden_states(model)
    torch.testing.assert_close(hidden_states(model, rows), whole[rows], rtol=1e-4, atol=1e-4)
    assert sizes == [9, 4]


def refused(code, call):
    with pytest.raises(PolyrecError) as caught:
        call()
    assert caught.value.code == code
    return str(caught.value)


def test_no_quantisation_of_a_quantised_checkpoint_is_refused(tmp_path):
    quantised(tmp_path, *SCALES["[out, 1]"])
    assert "--quantization none" in refused("checkpoint_quantized", lambda: loaded(tmp_path, quantization="none"))
    assert kinds(loaded(tmp_path, quantization="fp8")) == {Fp8Linear}


def test_training_from_a_quantised_checkpoint_is_refused(tmp_path):
    quantised(tmp_path, *SCALES["[out, 1]"])
    values = checkpoint.read_config(tmp_path)
    refused("checkpoint_quantized", lambda: checkpoint.build_model(SPEC, values, CPU))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "static"),
        ({**PER_BLOCK, "weight_block_size": [64, 128]}, r"\[64, 128\]"),
        ({**COMPRESSED, "config_groups": {"a": GROUP, "b": GROUP}}, "2 config_groups"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "input_activations": {"dynamic": False}}}}, "static"),
        ({**COMPRESSED, "config_groups": {"a": {"weights": {"type": "int", "num_bits": 4}}}}, "4 bits"),
        (
            {**COMPRESSED, "config_groups": {"a": {"weights": {"type": "float", "num_bits": 8, "strategy": "group"}}}},
            "group",
        ),
    ],
)
def test_other_quantisations_are_refused(tmp_path, given, named):
    write(tmp_path)
    change_config(tmp_path, quantization_config=given)
    with pytest.raises(CheckpointError, match=named) as caught:
        loaded(tmp_path)
    assert caught.value.code == "quantization_unsupported"


def test_a_checkpoint_that_is_quantised_in_part_is_refused(tmp_path):
    weights = quantised(tmp_path, *SCALES["[out, 1]"])
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name].bfloat16()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert name in refused("quantization_mixed", lambda: loaded(tmp_path))


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_quantised_weights_without_a_config_of_it_are_refused(tmp_path, quantization):
    quantised(tmp_path, *SCALES["[out, 1]"])
    change_config(tmp_path, quantization_config=None)
    refused("quantization_undeclared", lambda: loaded(tmp_path, quantization=quantization))


def test_a_missing_scale_is_named(tmp_path):
    weights = quantised(tmp_path, *SCALES["[out, 1]"])
    del weights["model.layers.0.self_attn.v_proj.weight_scale"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert "v_proj.weight_scale" in refused("weights_do_not_fit", lambda: loaded(tmp_path))


def test_a_quantised_weight_that_is_no_number_is_refused(tmp_path):
    weights = quantised(tmp_path, *SCALES["[out, 1]"])
    name = "model.layers.0.self_attn.v_proj.weight"
    weights[name].view(torch.uint8)[3, 5] = 0xFF
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert name in refused("weights_not_finite", lambda: loaded(tmp_path))


class Accelerator(type(CPU)):
    """The CPU as a platform whose models keep their dtype."""

    half_by_default = True


def accelerator(*lacking, fp8=True):
    backend = Accelerator(capabilities=replace(CPU.capabilities, fp8=fp8))
    linear = replace(backend.ops.linear, **dict.fromkeys(lacking, MISSING))
    backend.table = resolve(Accelerator, replace(backend.ops, linear=linear), {}, "warn", "infer")
    backend.ops, backend.attention = backend.table.ops, CPU.attention
    return backend


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_auto_keeps_a_half_precision_checkpoints_dtype_on_an_accelerator(tmp_path, stored, quantization):
    write(tmp_path, dtype=stored)
    model = loaded(tmp_path, backend=accelerator(), quantization=quantization)
    expected = torch.bfloat16 if (stored, quantization) == (torch.float32, "fp8") else stored
    assert model.head_weight.dtype == model.layers[0].input_layernorm.weight.dtype == expected
    assert loaded(tmp_path, quantization=quantization).head_weight.dtype == torch.float32  # the CPU


def test_a_dtype_that_is_named_is_taken(tmp_path):
    write(tmp_path, dtype=torch.bfloat16)
    assert loaded(tmp_path).head_weight.dtype == torch.float32
    assert (
        checkpoint.load_model(tmp_path, CPU, options=ModelOptions(dtype="bfloat16")).head_weight.dtype == torch.bfloat16
    )
    named = ModelOptions(dtype="float32")
    assert checkpoint.load_model(tmp_path, accelerator(), options=named).head_weight.dtype == torch.float32


def test_a_platform_without_the_operations_is_refused(tmp_path):
    write(tmp_path)
    backend = accelerator("scaled_mm")
    text = refused("fp8_unavailable", lambda: loaded(tmp_path, backend=backend, quantization="fp8"))
    assert "linear.scaled_mm" in text
    assert kinds(loaded(tmp_path, backend=backend)) == {Linear}


def test_a_platform_without_e4m3_products_says_that_they_are_slow(tmp_path, caplog):
    write(tmp_path)
    loaded(tmp_path, backend=accelerator(), quantization="fp8")
    assert "fp8_slow" not in caplog.text
    loaded(tmp_path, backend=accelerator(fp8=False), quantization="fp8")
    assert "[fp8_slow]" in caplog.text


def fusing():
    """A platform with an operation of its own for a product and the norm after it, which it counts; -> (it, its calls)."""
    backend, calls = accelerator(), []

    def counted(*arguments):
        calls.append(len(arguments[0]))
        return mm_add_rms_norm_fp8(*arguments)

    norm = replace(backend.ops.norm, mm_add_rms_norm_fp8=counted)
    backend.table = resolve(Accelerator, replace(backend.ops, norm=norm), {}, "warn", "infer")
    backend.ops = backend.table.ops
    return backend, calls


@pytest.mark.parametrize("rows", [None, torch.tensor([8, 0, 3])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_and_the_norm_after_it_are_one_operation_where_the_platform_has_it(tmp_path, dtype, rows):
    """Bit for bit what the two give; one call less a block, but for the model's last, whose norm does not quantise."""
    write(tmp_path)
    backend, calls = fusing()
    found = hidden_states(loaded(tmp_path, backend=backend, dtype=dtype, quantization="fp8"), rows)
    last = 9 if rows is None else len(rows)
    assert calls == [9, 9, last]  # of two layers: attention's output and down, attention's output
    assert torch.equal(found, hidden_states(loaded(tmp_path, dtype=dtype, quantization="fp8"), rows))
    apart = loaded(tmp_path, backend=backend, dtype=dtype, quantization="fp8", enable_fused_rms_fp8=False)
    hidden_states(apart, rows)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("field", "leaves"), [(None, True), ("kv.write", False), ("rope.rotary", False), ("norm.rms_norm", False)]
)
def test_no_plan_passes_over_a_plugins_part_of_the_rotation(tmp_path, field, leaves):
    write(tmp_path)
    backend = accelerator()
    if field is not None:
        group, _, name = field.partition(".")
        operation = Replacement(
            getattr(getattr(REFERENCE_OPS, group), name), PluginSource("fast", "fast-dist", "1.2.3")
        )
        backend.table = resolve(Accelerator, backend.ops, {field: operation}, "warn", "infer")
    given, plan = [], PackedPlan(packed_layout(torch.tensor([9])))

    class Rotates(type(plan)):
        rotates = True

        def run_product(self, layer, query, key, value, rotation):
            given.append(layer)
            return query.flatten(1)

    plan.__class__ = Rotates
    with torch.inference_mode():
        loaded(tmp_path, backend=backend)(torch.arange(9), torch.arange(9), plan)
    assert given == ([0, 1] if leaves else [])


@pytest.mark.parametrize("off", ["enable_fused_rms_fp8", "enable_fused_silu_fp8", "enable_fused_qk_rope_kv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_fused_operation_can_be_turned_off(tmp_path, off, dtype):
    write(tmp_path)
    fused = hidden_states(loaded(tmp_path, dtype=dtype, quantization="fp8"))
    apart = hidden_states(loaded(tmp_path, dtype=dtype, quantization="fp8", **{off: False}))
    assert (apart - fused).norm() / fused.norm() <= (1e-5 if dtype == torch.float32 else 0.025)
