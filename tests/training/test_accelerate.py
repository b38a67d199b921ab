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

from polyrec.core.errors import TrainingError
from polyrec.core.files import read_json
from polyrec.data.packing import pack
from polyrec.hardware.base.backend import Capabilities
from polyrec.sid.layout import SidLayout
from polyrec.training import accelerate, run
from polyrec.training.accelerate import LARGE, compiles_layers, prepare_layers, weights_dtype

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
def test_layers_are_compiled_by_themselves_only_where_it_pays(monkeypatch, triton):
    monkeypatch.setattr(accelerate, "has_triton", lambda: triton)
    assert compiles_layers("auto", LARGE, platform()) is triton
    assert not compiles_layers("auto", LARGE - 1, platform())
    assert not compiles_layers("auto", LARGE, platform(overlaps=False))
    assert not compiles_layers("off", LARGE, platform())
    assert compiles_layers("on", 1, platform(overlaps=False))


def loss_and_gradients(model):
    batch = pack(random_examples(np.random.default_rng(3), LAYOUT, prompt_weight=0.5), LAYOUT)
    loss = objective(model, LAYOUT, "level")(model, batch).mean
    loss.backward()
    return loss.item(), [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize(("compiled", "checkpointed"), [(False, 1), (False, 9), (True, 0), (True, 1)])
def test_another_way_gives_the_same_gradients(monkeypatch, compiled, checkpointed):
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
    prepare_layers(other, compiled=compiled, checkpointed=checkpointed)
    expected, found = loss_and_gradients(plain), loss_and_gradients(other)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for one, wanted in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-6)
    assert len(compiles) == compiled, "one function serves all layers"
    assert len(again) == min(checkpointed, 2)


def test_evaluation_runs_layers_as_they_are(monkeypatch):
    monkeypatch.setattr(accelerate, "checkpoint", lambda *_, **__: pytest.fail("nothing is trained"))
    model = tiny_model(LAYOUT, seed=1)
    prepare_layers(model, compiled=False, checkpointed=2)
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
