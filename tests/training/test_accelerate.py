"""When bf16 and compiled layers are chosen; layers that run in another way give the same losses; a bf16 run is resumed."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import tiny_model
from safetensors.torch import load_file
from test_objective import objective, random_examples
from torch.utils._python_dispatch import TorchDispatchMode

from polyrec.core.errors import TrainingError
from polyrec.core.files import read_json
from polyrec.data.packing import pack
from polyrec.hardware.base.backend import Capabilities
from polyrec.sid.layout import SidLayout
from polyrec.training import accelerate, run
from polyrec.training.accelerate import LARGE, compiles, keeps_less, layer_form, prepare_layers, weights_dtype

LAYOUT = SidLayout.contiguous((5, 6, 7), 2)


def platform(*dtypes, overlaps=True):
    capabilities = Capabilities(dtypes=(torch.float32, *dtypes), async_copies=overlaps)
    return SimpleNamespace(platform_name="some", capabilities=capabilities)


@pytest.mark.parametrize(
    ("precision", "parameters", "backend", "expected"),
    [
        ("auto", LARGE, platform(torch.bfloat16), torch.bfloat16),
        ("auto", LARGE - 1, platform(torch.bfloat16), torch.float32),
        ("auto", LARGE, platform(torch.float16), torch.float32),
        ("auto", LARGE, platform(torch.bfloat16, overlaps=False), torch.float32),
        ("bf16", 1, platform(torch.bfloat16, overlaps=False), torch.bfloat16),
        ("fp32", LARGE, platform(torch.bfloat16), torch.float32),
    ],
)
def test_precision(precision, parameters, backend, expected):
    assert weights_dtype(precision, parameters, backend) == expected


def test_a_platform_without_bf16_refuses_it():
    with pytest.raises(TrainingError, match="'some' has float32, float16") as error:
        weights_dtype("bf16", LARGE, platform(torch.float16))
    assert error.value.code == "precision_unsupported"


@pytest.mark.parametrize("triton", [True, False])
def test_torch_compiles_by_itself_only_where_it_pays(monkeypatch, triton):
    monkeypatch.setattr(accelerate, "has_triton", lambda: triton)
    assert compiles("auto", LARGE, platform()) is triton
    assert not compiles("auto", LARGE - 1, platform())
    assert not compiles("auto", LARGE, platform(overlaps=False))
    assert not compiles("off", LARGE, platform())
    assert compiles("on", 1, platform(overlaps=False))


def with_origins(**origins):
    """A platform whose operations come from where it says; all others are its own."""

    def row(field):
        return SimpleNamespace(origin=origins.get(field.partition(".")[2], "built-in"))

    return SimpleNamespace(**vars(platform()), table=SimpleNamespace(row=row))


@pytest.mark.parametrize(
    ("origins", "expected"),
    [
        ({}, True),
        ({"add_rms_norm_mm": "inherited"}, True),
        ({"silu_and_mul_mm": "plugin"}, True),
        ({"add_rms_norm_mm": "reference"}, False),
        ({"silu_and_mul_mm": "decomposed"}, False),
        ({"qkv_norm_rotary": "reference"}, False),
        ({"qk_norm_rotary": "plugin"}, False),
        ({"mm": "plugin"}, False),
        ({"silu_and_mul": "plugin"}, False),
        ({"rotary": "plugin"}, True),
    ],
)
def test_who_keeps_less(origins, expected):
    """No operation of a plugin is passed over by one that contains it."""
    assert keeps_less(with_origins(**origins)) is expected


def test_the_cpu_keeps_what_it_has(backend):
    assert not keeps_less(backend)


@pytest.mark.parametrize("wanted", ["auto", "off", "on"])
@pytest.mark.parametrize("parameters", [LARGE, LARGE - 1])
def test_the_form_of_layers(monkeypatch, wanted, parameters):
    monkeypatch.setattr(accelerate, "has_triton", lambda: True)
    own, reference = with_origins(), with_origins(silu_and_mul_mm="reference")
    large = parameters >= LARGE
    assert layer_form(wanted, parameters, own) == ("compiled" if wanted == "on" else "fused" if large else "plain")
    compiled = wanted == "on" or (wanted == "auto" and large)
    assert layer_form(wanted, parameters, reference) == ("compiled" if compiled else "plain")


def loss_and_gradients(model):
    batch = pack(random_examples(np.random.default_rng(3), LAYOUT, prompt_weight=0.5), LAYOUT)
    loss = objective(model, LAYOUT, "level")(model, batch).mean
    loss.backward()
    return loss.item(), [one.grad for one in model.parameters() if one.grad is not None]


FORMS = [("plain", 1), ("plain", 9), ("fused", 0), ("fused", 1), ("compiled", 0), ("compiled", 1)]


@pytest.mark.parametrize(("form", "checkpointed"), FORMS)
def test_another_way_gives_the_same_gradients(monkeypatch, form, checkpointed):
    """torch's tracing and partition, without the code generator, which needs a C++ compiler here."""
    real, compiles, again = torch.compile, [], []

    def traced(function, **options):
        compiles.append(function)
        return real(function, backend="aot_eager", **options)

    def checkpoint(function, *arguments, **options):
        again.append(arguments[0])
        return kept(function, *arguments, **options)

    kept = accelerate.checkpoint
    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr(accelerate, "checkpoint", checkpoint)
    torch.compiler.reset()
    plain = tiny_model(LAYOUT, seed=1).train()
    other = copy.deepcopy(plain)
    prepare_layers(other, form, checkpointed=checkpointed)
    expected, found = loss_and_gradients(plain), loss_and_gradients(other)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for one, wanted in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-6)
    assert len(compiles) == (form == "compiled"), "one function serves all layers"
    assert sum(isinstance(one, torch.nn.Module) for one in again) == min(checkpointed, 2), "whole layers"
    assert len(again) == (2 if form == "fused" else min(checkpointed, 2)), "or what stands around attention"


class Executed(TorchDispatchMode):
    """Names of torch's operations that were computed, not taken from what was kept."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    def count(self, name):
        return self.names.count(name)


def test_fused_layers_attend_once_and_turn_queries_twice(monkeypatch):
    """What leads to attention is made again in the backward pass, attention itself is not."""
    model = tiny_model(LAYOUT, seed=1).train()
    prepare_layers(model, "fused", checkpointed=0)
    turned = []
    for layer in model.layers:
        op = layer.self_attn._qkv_norm_rotary
        layer.self_attn._qkv_norm_rotary = lambda *arguments, op=op: turned.append(1) or op(*arguments)
    with Executed() as executed:
        loss_and_gradients(model)
    assert executed.count("_scaled_dot_product_flash_attention_for_cpu") == 2
    assert executed.count("_scaled_dot_product_flash_attention_for_cpu_backward") == 2
    assert len(turned) == 4


def test_evaluation_runs_layers_as_they_are(monkeypatch):
    monkeypatch.setattr(accelerate, "checkpoint", lambda *_, **__: pytest.fail("nothing is trained"))
    model = tiny_model(LAYOUT, seed=1)
    prepare_layers(model, "plain", checkpointed=2)
    batch = pack(random_examples(np.random.default_rng(3), LAYOUT), LAYOUT)
    for training, gradients in ((False, True), (True, False)):
        with torch.set_grad_enabled(gradients):
            objective(model.train(training), LAYOUT, "level")(model, batch)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_a_bf16_run_is_resumed_bit_for_bit(data, recipe, backend, tmp_path, ema_decay):
    config = recipe(
        precision="bf16", checkpoint_activations=1, checkpoint_every=2, optim={"ema_decay": ema_decay}, eval_every=3
    )
    run.train(data, tmp_path / "quiet", config, backend)

    def stop(facts):
        if facts.step == 5:
            raise Stopped

    with pytest.raises(Stopped):
        run.train(data, tmp_path / "stopped", config, backend, events=run.RunEvents(on_step=stop))
    run.train(data, tmp_path / "stopped", config, backend)
    quiet, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("quiet", "stopped"))
    kept = torch.float32 if ema_decay else torch.bfloat16  # an average is fp32
    assert {one.dtype for one in quiet.values()} == {kept}
    assert all(torch.equal(one, resumed[name]) for name, one in quiet.items())
    assert read_json(tmp_path / "quiet" / "config.json")["torch_dtype"] == str(kept).removeprefix("torch.")
