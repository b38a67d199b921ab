"""Training on a device: a step equals the CPU's, and a run that is stopped goes on as if nothing had happened.

It needs no prepared data, so that it runs where only torch and the package's light dependencies are. Compiling takes most of
its time, so the CPU's losses are computed once for all cases, and torch's compiler runs in one.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._triton import has_triton_package

from polyrec.data.packing import Example, pack
from polyrec.data.prompt import PromptBuilder, PromptConfig
from polyrec.hardware import build_hardware_backend
from polyrec.hardware.base.config import HardwareConfig
from polyrec.models.checkpoint import build_model
from polyrec.models.qwen3 import SPEC
from polyrec.sid.layout import SidLayout
from polyrec.training.accelerate import LARGE, keeps_less, layer_form, prepare_layers
from polyrec.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from polyrec.training.objective import Objective
from polyrec.training.recipe import OptimConfig
from polyrec.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda"),
]
LAYOUT = SidLayout.contiguous((32, 32, 32), 2)
VALUES = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": LAYOUT.end + 3, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "initializer_range": 0.1, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def device_backend():
    return build_hardware_backend(HardwareConfig(purpose="train"))


def batch(step, *, branches=True):
    """Histories of several lengths, each with one target or up to three."""
    rng = np.random.default_rng(step)
    builder = PromptBuilder(LAYOUT, PromptConfig(max_items=20))

    def draw(count):
        return np.stack([rng.integers(0, size, count) for size in LAYOUT.codebook_sizes], axis=1)

    examples = []
    for _ in range(8):
        items = int(rng.integers(1, 20))
        targets = draw(int(rng.integers(1, 4)) if branches else 1)
        prompt = builder.build(draw(items), np.arange(items))
        examples.append(Example(prompt, targets, np.ones(len(targets)), prompt_weight=0.5))
    return pack(examples, LAYOUT)


def make_trainer(backend, dtype, *, head="level", form="plain", checkpointed=0, branches=True, seed=0):
    model = build_model(SPEC, VALUES, backend)
    drawn = build_model(SPEC, VALUES, build_hardware_backend(HardwareConfig(device="cpu")))
    drawn.init_weights(torch.Generator().manual_seed(seed))
    model.load_state_dict(drawn.state_dict())
    model = model.to(dtype).train()
    objective = Objective(LAYOUT, head, backend, model.attention_needs(dtype, train=True))
    loader = SimpleNamespace(batch=lambda step: batch(step, branches=branches))
    config = OptimConfig(learning_rate=3e-3, warmup_steps=2, ema_decay=0.9)
    trainer = Trainer(model, loader, objective, config, 12, ops=backend.ops, compiled=form == "compiled")
    prepare_layers(model, form, checkpointed=checkpointed)
    return trainer


def losses(trainer, steps):
    return [trainer.train_step().loss for _ in range(steps)]


@functools.cache
def cpu_losses(head, branches):
    backend = build_hardware_backend(HardwareConfig(device="cpu"))
    return losses(make_trainer(backend, torch.float32, head=head, branches=branches), 6)


FORMS = [(head, branches) for head in ("level", "vocab") for branches in (True, False)]


@pytest.mark.parametrize(
    ("head", "branches", "dtype", "form", "checkpointed", "limit"),
    [
        *((*form, torch.float32, "plain", 0, 1e-4) for form in FORMS[::3]),
        *((*form, torch.float32, "fused", 0, 1e-4) for form in FORMS),
        *((*form, torch.bfloat16, "plain", 2, 2e-2) for form in FORMS[1:3]),
        *((*form, torch.bfloat16, "fused", 1, 2e-2) for form in FORMS),
        (*FORMS[0], torch.bfloat16, "compiled", 0, 2e-2),
    ],
)
def test_losses_are_the_cpus(device_backend, head, branches, dtype, form, checkpointed, limit):
    torch.compiler.reset()
    expected = cpu_losses(head, branches)
    trainer = make_trainer(device_backend, dtype, head=head, branches=branches, form=form, checkpointed=checkpointed)
    found = losses(trainer, 6)
    assert expected[-1] < expected[0] * 0.99, "something is learnt"
    np.testing.assert_allclose(found, expected, rtol=limit)


def test_this_platform_has_fused_layers(device_backend):
    """Unless Triton is not installed: then all operations are torch's."""
    own = has_triton_package()
    assert keeps_less(device_backend) is own
    assert layer_form("off", LARGE, device_backend) == ("fused" if own else "plain")


def test_a_step_with_masters_waits_for_its_facts_alone(device_backend):
    """Then the next step is launched while the update runs. torch refuses copies and questions that make the host wait; the
    event of loss and norm is none of them."""
    trainer = make_trainer(device_backend, torch.bfloat16, head="vocab", form="fused", branches=False)
    losses(trainer, 3)  # kernels are compiled, and chosen by their time
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses(trainer, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_run_ends_where_a_quiet_one_ends(device_backend, dtype, tmp_path):
    runtime = device_backend.runtime
    quiet = make_trainer(device_backend, dtype, form="fused")
    losses(quiet, 4)
    save_checkpoint(tmp_path, quiet, runtime.rng_state(), {}, 1)
    drawn = torch.rand(5, device=runtime.device)
    expected = losses(quiet, 4)

    resumed = make_trainer(device_backend, dtype, form="fused", seed=1)
    resumed.progress, rng = load_checkpoint(checkpoints(tmp_path)[-1], resumed)
    runtime.set_rng_state(rng)
    assert torch.equal(torch.rand(5, device=runtime.device), drawn)
    assert resumed.progress.step == 4
    np.testing.assert_allclose(losses(resumed, 4), expected, rtol=1e-3)
    for pair in ((quiet.model, resumed.model), (quiet.result, resumed.result)):
        for one, other in zip(*(model.parameters() for model in pair), strict=True):
            assert one.dtype == other.dtype
            assert torch.linalg.vector_norm((one - other).float()) < 5e-3 * torch.linalg.vector_norm(one.float())
    for one, other in zip(states(quiet), states(resumed), strict=True):
        assert one.dtype == other.dtype
        assert one.device == other.device


def states(trainer):
    """Every tensor of the optimizer's state."""
    found = []

    def visit(value):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, list):
            for inner in value:
                visit(inner)

    visit(trainer.optimizer.state_dict())
    return found
