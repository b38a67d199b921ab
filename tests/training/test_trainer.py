"""The loop equals a plain one written with torch.optim; a gradient that is not finite stops it in time."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import tiny_model
from test_objective import objective as objective_of
from test_objective import random_examples

from polyrec.core.errors import TrainingError
from polyrec.data.packing import pack
from polyrec.hardware.backends.cpu.runtime import CpuRuntime
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.hardware.ops.optim import OptimOps
from polyrec.models import spec
from polyrec.sid.layout import SidLayout
from polyrec.training.accelerate import prepare_layers
from polyrec.training.objective import Loss
from polyrec.training.recipe import OptimConfig, learning_rate
from polyrec.training.trainer import RunningAverage, Trainer

STEPS = 12


class Net(torch.nn.Module):
    """A matrix, a vector and a norm: what AdamW must treat in two ways."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(5, 4)
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.linear(x))


class Loader:
    def __init__(self):
        self.asked = []

    def batch(self, step):
        self.asked.append(step)
        x = torch.from_numpy(np.random.default_rng(step).standard_normal((6, 5))).float()
        return SimpleNamespace(token_ids=np.zeros(6), x=x)


def loss_of(model, batch):
    """Grows from step to step, so that clipping bites at some steps and not at others."""
    return (model(batch.x) * batch.x[:, :4]).square().mean() * 10 ** (batch.x[0, 0].item() - 0.5)


def objective(model, batch):
    loss = loss_of(model, batch)
    return Loss(loss, torch.stack([loss.detach()]))


class OnRuntime:
    """A loss as an objective whose device has that runtime."""

    def __init__(self, loss, runtime):
        self._loss = loss
        self.runtime = runtime

    def __call__(self, model, batch):
        return self._loss(model, batch)


def make_trainer(model, config, objective=objective, steps=STEPS, runtime=None, ops=REFERENCE_OPS):
    loader, on_runtime = Loader(), OnRuntime(objective, runtime or CpuRuntime())
    return Trainer(model, loader, on_runtime, config, steps, ops=ops), loader


def reference_run(model, config, steps):
    """AdamW, clipping and schedule put together from torch's own parts."""
    decayed = [model.linear.weight]
    others = [model.linear.bias, model.norm.weight, model.norm.bias]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
    )
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    )
    decay_steps = steps - config.warmup_steps
    losses, norms, rates = [], [], []
    for step in range(steps):
        rate = optimizer.param_groups[0]["lr"]
        if step >= config.warmup_steps:
            low = config.learning_rate * config.final_ratio
            angle = math.pi * (step - config.warmup_steps) / decay_steps
            rate = low + (config.learning_rate - low) * (1 + math.cos(angle)) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss = loss_of(model, Loader().batch(step))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in model.parameters())).item()
        if norm > config.clip_norm:
            for parameter in model.parameters():
                parameter.grad *= config.clip_norm / norm
        optimizer.step()
        if step + 1 < config.warmup_steps:
            warm_up.step()
        losses.append(loss.item())
        norms.append(norm)
        rates.append(rate)
    return losses, norms, rates


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": 4},
        {"warmup_steps": 0, "weight_decay": 0.5, "final_ratio": 0.0},
        {"warmup_steps": 3, "clip_norm": 0.2, "learning_rate": 0.03, "beta1": 0.5, "beta2": 0.9},
        {"warmup_steps": 3, "clip_norm": 1e9, "final_ratio": 1.0},
    ],
)
def test_equals_a_run_of_torchs_own_parts(settings):
    config = OptimConfig(**settings)
    model = Net()
    reference = copy.deepcopy(model)
    trainer, loader = make_trainer(model, config)
    facts = []
    trainer.run(lambda one: facts.append(one) or True)
    losses, norms, rates = reference_run(reference, config, STEPS)

    assert loader.asked == list(range(STEPS))
    assert [one.step for one in facts] == list(range(1, STEPS + 1))
    np.testing.assert_allclose([one.learning_rate for one in facts], rates, rtol=1e-9)
    np.testing.assert_allclose([one.loss for one in facts], losses, rtol=1e-4)
    np.testing.assert_allclose([one.grad_norm for one in facts], norms, rtol=1e-4)
    if settings.get("clip_norm") == 0.2:
        assert min(norms) < config.clip_norm < max(norms), "both kinds of steps are tried"
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_schedule_rises_to_its_peak_and_falls():
    config = OptimConfig(learning_rate=1.0, warmup_steps=10, final_ratio=0.1)
    rates = [learning_rate(config, step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert all(after < before for before, after in pairwise(rates[10:]))
    short = OptimConfig(learning_rate=1.0, warmup_steps=50)
    assert learning_rate(short, 3, 4) == pytest.approx(4 / 50), "a run shorter than its warm-up never leaves it"


def test_gradients_are_clipped_to_the_norm():
    trainer, _ = make_trainer(Net(), OptimConfig(clip_norm=1e-3))
    facts = trainer.train_step()
    after = torch.sqrt(sum(parameter.grad.square().sum() for parameter in trainer.model.parameters()))
    assert facts.grad_norm > 1e-3
    assert after.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "masters"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_spoils_nothing(poison, dtype):
    calls = []

    def poisoned(model, batch):
        calls.append(batch)
        loss = loss_of(model, SimpleNamespace(x=batch.x.to(dtype))) * (poison if len(calls) == 4 else 1.0)
        return Loss(loss, torch.stack([loss.detach()]))

    trainer, _ = make_trainer(Net().to(dtype), OptimConfig(learning_rate=3e-3, warmup_steps=8), poisoned)
    for _ in range(3):
        trainer.train_step()
    before = copy.deepcopy(trainer.model.state_dict()), copy.deepcopy(states_of(trainer))
    with pytest.raises(TrainingError) as error:
        trainer.train_step()
    assert error.value.code == "gradient_not_finite"
    assert "Step 4" in error.value.message
    assert f"loss {poison}" in error.value.message
    assert "1.50e-03" in error.value.message  # the rate of step 4 of 8 warm-up steps
    assert error.value.remedy
    assert trainer.progress.step == 3
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, before[0][name], rtol=0, atol=0)
    assert before[1]
    for state, kept in zip(states_of(trainer), before[1], strict=True):
        for name, value in state.items():
            torch.testing.assert_close(value, kept[name], rtol=0, atol=0)


def states_of(trainer):
    """Of the optimizer, its tensors by name."""
    saved = trainer.optimizer.state_dict()
    return saved["buckets"] if "buckets" in saved else list(saved["state"].values())


def test_no_gradient_of_the_last_step_is_held_in_the_forward_pass():
    """A gradient is as large as the model, and the forward pass ends where memory is at its fullest."""

    def looks(model, batch):
        assert all(parameter.grad is None for parameter in model.parameters())
        return objective(model, batch)

    trainer, _ = make_trainer(Net(), OptimConfig(ema_decay=0), looks)
    for _ in range(2):
        trainer.train_step()


def of_dtype(dtype):
    """`objective` for a model of that dtype."""

    def loss(model, batch):
        return objective(model, SimpleNamespace(x=batch.x.to(dtype)))

    return loss


class LateRuntime(CpuRuntime):
    """What is copied to the host arrives when its event is waited for, and not before. told: what happened, in order."""

    def __init__(self):
        super().__init__()
        self.told = []

    def to_host_async(self, tensor):
        self.told.append("copy")
        there = torch.full_like(tensor, torch.nan)

        def arrives():
            self.told.append("wait")
            there.copy_(tensor)

        return there, SimpleNamespace(synchronize=arrives)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "masters"])
def test_loss_and_norm_are_copied_before_the_update_and_waited_for_after_it(dtype):
    """So that the host is back while the update runs. Without masters it waits before it too: the norm may be none."""
    config, runtime = OptimConfig(warmup_steps=2, clip_norm=0.2), LateRuntime()
    trainer, loader = make_trainer(Net().to(dtype), config, of_dtype(dtype), runtime=runtime)
    told, batch, follow = runtime.told, loader.batch, trainer.averaged.update_parameters
    loader.batch = lambda step: told.append(f"batch {step}") or batch(step)
    trainer.averaged.update_parameters = lambda *args: told.append("average") or follow(*args)
    trainer.optimizer.register_step_pre_hook(lambda *_: told.append("update"))
    found = [trainer.train_step()]
    before = ["wait"] if dtype == torch.float32 else []
    assert told == ["batch 0", "copy", *before, "update", "average", "batch 1", "wait"]
    found += [trainer.train_step() for _ in range(3)]

    plain, _ = make_trainer(Net().to(dtype), config, of_dtype(dtype))
    for one in found:
        other = plain.train_step()
        assert (one.loss, one.by_level, one.grad_norm) == (other.loss, other.by_level, other.grad_norm)
        assert math.isfinite(one.loss)
    for model in ("model", "result"):
        pairs = zip(getattr(trainer, model).parameters(), getattr(plain, model).parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_with_masters_the_norm_is_the_devices_own_and_is_not_rounded():
    """To bf16, in which it would be .4 % off at most; nor is what gradients are scaled by."""
    asked, scales, plain = [], [], REFERENCE_OPS.optim.total_norm
    ops = replace(
        REFERENCE_OPS, optim=OptimOps(total_norm=lambda tensors: asked.append(len(tensors)) or plain(tensors))
    )
    config = OptimConfig(clip_norm=1e-3)
    trainer, _ = make_trainer(Net().bfloat16(), config, of_dtype(torch.bfloat16), ops=ops)
    trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: scales.append(optimizer.gradient_scale))
    rounded = 0
    for _ in range(5):
        found = trainer.train_step().grad_norm
        gradients = [parameter.grad.double().flatten() for parameter in trainer.model.parameters()]
        norm = torch.cat(gradients).norm().item()
        assert found == pytest.approx(norm, rel=1e-6)
        assert scales[-1].item() == pytest.approx(config.clip_norm / norm, rel=1e-4)
        rounded += found != torch.tensor(found).bfloat16().item()
    assert rounded > 0
    assert asked == [len(gradients)] * 5


def test_a_step_with_masters_asks_its_device_for_loss_and_norm_alone(monkeypatch):
    """A meta device has no numbers that the host could wait for."""

    class MetaRuntime(CpuRuntime):
        def to_host_async(self, tensor):
            return torch.arange(1.0, 1 + len(tensor)), SimpleNamespace(synchronize=lambda: None)

    def loss(model, batch):
        return objective(model, SimpleNamespace(x=batch.x.to("meta", torch.bfloat16)))

    monkeypatch.setattr(f"{__name__}.loss_of", lambda model, batch: (model(batch.x) * batch.x[:, :4]).square().mean())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # which takes an accelerator
    trainer, _ = make_trainer(Net().bfloat16().to("meta"), OptimConfig(), loss, runtime=MetaRuntime())
    for _ in range(3):
        facts = trainer.train_step()
    assert (facts.loss, facts.grad_norm, facts.by_level) == (1.0, 2.0, (3.0,))


def test_on_step_ends_a_run():
    trainer, loader = make_trainer(Net(), OptimConfig())
    trainer.run(lambda facts: facts.step < 5)
    assert loader.asked == [0, 1, 2, 3, 4, 5], "the next batch is made while the device works"
    assert trainer.progress.step == 5
    trainer.run(lambda facts: True)  # goes on where it was
    assert loader.asked == list(range(STEPS)), "each batch once"


def test_a_batch_that_cannot_be_made_fails_its_own_step_and_not_the_one_before():
    trainer, loader = make_trainer(Net(), OptimConfig())
    batch, told = loader.batch, []

    def ends(step):
        if step == 3:
            raise ValueError("no more")
        return batch(step)

    loader.batch = ends
    with pytest.raises(ValueError, match="no more"):
        trainer.run(lambda facts: bool(told.append(facts.step)) or True)
    assert told == [1, 2, 3]
    assert trainer.progress.step == 3
    trainer, loader = make_trainer(Net(), OptimConfig())
    loader.batch = ends
    trainer.run(lambda facts: facts.step < 3)  # needs none of the batches that are not there
    assert trainer.progress.step == 3


def test_a_run_that_is_set_to_another_step_takes_that_ones_batch():
    trainer, loader = make_trainer(Net(), OptimConfig())
    trainer.train_step()
    trainer.progress.step = 7
    facts = trainer.train_step()
    assert loader.asked == [0, 1, 7, 8]
    assert facts.step == 8


def test_the_kept_model_is_the_running_RunningAverage_the_weights():
    trainer, _ = make_trainer(Net(), OptimConfig(ema_decay=0.6, warmup_steps=2))
    expected = {name: weight.detach().double() for name, weight in trainer.model.named_parameters()}
    for step in range(12):
        trainer.train_step()
        # The first update copies; later ones average with a decay that grows up to the set one.
        decay = 0.0 if step == 0 else min(0.6, (1 + step) / (10 + step))
        for name, weight in trainer.model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * weight.detach().double()
    for name, weight in trainer.result.named_parameters():
        torch.testing.assert_close(weight.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert any(
        not torch.equal(a, b) for a, b in zip(trainer.result.parameters(), trainer.model.parameters(), strict=True)
    )


def test_an_average_follows_without_a_wait_for_its_device():
    """A meta device has no numbers that the host could wait for."""
    model = Net().to("meta")
    averaged = RunningAverage(model, 0.9)
    for _ in range(3):
        averaged.update_parameters(model)
    assert int(averaged.n_averaged) == 3


def test_without_averaging_the_last_weights_are_kept():
    trainer, _ = make_trainer(Net(), OptimConfig(ema_decay=0.0))
    assert trainer.result is trainer.model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["plain", "fused"])
@pytest.mark.parametrize("head", ["level", "vocab"])
def test_a_tied_weight_is_trained_as_one_of_two_uses(monkeypatch, head, form, dtype):
    """Bit for bit, over steps of the whole loop."""
    layout = SidLayout.contiguous((200, 150, 250), 2)

    def batch(step):
        return pack(random_examples(np.random.default_rng(step), layout, prompt_weight=0.5), layout)

    def trained():
        model = tiny_model(layout, seed=0).to(dtype).train()
        config = OptimConfig(learning_rate=0.01, warmup_steps=1, clip_norm=0.5, ema_decay=0)
        objective = objective_of(model, layout, head)
        trainer = Trainer(model, SimpleNamespace(batch=batch), objective, config, 4, ops=REFERENCE_OPS)
        prepare_layers(model, form, checkpointed=0)
        facts = [trainer.train_step() for _ in range(4)]
        return [(one.loss, one.by_level, one.grad_norm) for one in facts], list(model.parameters())

    asked = []
    joined = spec.embed_tied
    monkeypatch.setattr(spec, "embed_tied", lambda *args: asked.append([len(arg) for arg in args]) or joined(*args))
    found = trained()
    monkeypatch.setattr(spec, "embed_tied", lambda weight, ids: (torch.nn.functional.embedding(ids, weight), weight))
    expected = trained()
    assert len(asked) == 4
    assert all(tokens < vocab for vocab, tokens in asked), "batches are short enough for it"
    assert found[0] == expected[0]
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("head", ["level", "vocab"])
def test_gradients_of_two_batches_add_up(head):
    layout = SidLayout.contiguous((200, 150, 250), 2)
    model = tiny_model(layout, seed=0).double()
    batches = [pack(random_examples(np.random.default_rng(step), layout), layout) for step in range(2)]
    alone = []
    for one in batches:
        model.zero_grad(set_to_none=True)
        objective_of(model, layout, head)(model, one).mean.backward()
        alone.append(model.embed_tokens.weight.grad)
    model.zero_grad(set_to_none=True)
    for one in batches:
        objective_of(model, layout, head)(model, one).mean.backward()
    torch.testing.assert_close(model.embed_tokens.weight.grad, alone[0] + alone[1])
