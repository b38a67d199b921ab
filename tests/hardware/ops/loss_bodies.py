"""The loss in blocks against its reference and against float64: one body for a device and for Triton's interpreter.

`test_loss.py` runs this file in a process of its own, since Triton decides at its import whether to interpret.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conversions import INTERPRETED, backend_of_bodies

from polyrec.hardware.backends.cuda_like.ops import loss
from polyrec.hardware.ops.check import check_op
from polyrec.hardware.ops.loss import LossOps
from polyrec.hardware.ops.spec import group_specs

OPS = loss.loss_ops()
SHAPES = [(1, 16, 3), (37, 24, 100), (9, 8, 8200)] + (
    [] if INTERPRETED else [(1000, 2048, 30_001), (4096, 512, 176_256)]
)
LOOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Lets the kernel run on the host where Triton interprets it, and cuts the rows of small cases into several blocks.

    Memory that nothing has written holds NaN: it often holds zeros, with which a sum that begins there would go unseen.
    """
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(float("nan")))
    monkeypatch.setattr(loss, "BLOCK_BYTES", 20_000 if INTERPRETED else 1 << 28)
    if INTERPRETED:
        monkeypatch.setattr(loss, "on_accelerator", lambda x: True)


@pytest.fixture(scope="module")
def backend():
    return backend_of_bodies()


def case(device, rows, dim, classes, dtype):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, dim, generator=generator).to(dtype)
    weight = (torch.randn(classes, dim, generator=generator) * 3 * dim**-0.5).to(dtype)
    targets = torch.randint(0, classes, (rows,), generator=generator)
    scale = torch.rand(rows, generator=generator) * 2
    scale[::3] = 0
    return tuple(part.to(device) for part in (hidden, weight, targets, scale))


def by_float64(hidden, weight, targets, scale):
    """-> losses, and the gradients of Σ scale · loss."""
    h, w = (part.detach().double().cpu().requires_grad_() for part in (hidden, weight))
    losses = torch.nn.functional.cross_entropy(h @ w.T, targets.cpu(), reduction="none")
    (losses * scale.double().cpu()).sum().backward()
    return losses.detach(), h.grad, w.grad


def close(found, expected, dtype):
    """By norms: a gradient's entries differ in size by orders."""
    assert found.isfinite().all()
    difference = torch.linalg.vector_norm(found.double().cpu() - expected) / torch.linalg.vector_norm(expected)
    assert difference < LOOSE[dtype]


@pytest.mark.parametrize("dtype", LOOSE, ids=str)
@pytest.mark.parametrize(("rows", "dim", "classes"), SHAPES)
def test_both_losses_and_their_gradients(backend, rows, dim, classes, dtype):
    hidden, weight, targets, scale = case(backend.runtime.device, rows, dim, classes, dtype)
    if rows == 1:
        scale.fill_(0.5)
    losses, by_hidden, by_weight = by_float64(hidden, weight, targets, scale)
    for weighted in (False, True):
        leaves = [part.detach().requires_grad_() for part in (hidden, weight)]
        if weighted:
            total, found = OPS.weighted_cross_entropy(*leaves, targets, scale)
            assert not found.requires_grad
        else:
            found = OPS.linear_cross_entropy(*leaves, targets)
            total = (found * scale).sum()
        (total * 0.25).backward()
        assert found.dtype == total.dtype == torch.float32
        close(found.detach(), losses, dtype)
        close(total.detach()[None], (losses * scale.double().cpu()).sum()[None], dtype)
        close(leaves[0].grad, by_hidden / 4, dtype)
        close(leaves[1].grad, by_weight / 4, dtype)


@pytest.mark.parametrize("field", ["linear_cross_entropy", "weighted_cross_entropy"])
def test_the_layers_own_check(backend, field):
    dtypes = (torch.float32, torch.bfloat16) if INTERPRETED else backend.capabilities.dtypes
    faults = check_op(
        f"loss.{field}", group_specs(LossOps)[field], getattr(OPS, field),
        runtime=backend.runtime, graph=backend.graph, dtypes=dtypes, train=True, level="full",
    )  # fmt: skip
    assert faults == [], "\n".join(map(str, faults))


@pytest.mark.parametrize("trained", ["hidden", "weight", "nothing"])
def test_only_what_is_trained_gets_a_gradient(backend, trained):
    hidden, weight, targets, scale = case(backend.runtime.device, 37, 24, 100, torch.float32)
    leaves = {"hidden": hidden, "weight": weight}
    if trained != "nothing":
        leaves[trained].requires_grad_()
    total, losses = OPS.weighted_cross_entropy(hidden, weight, targets, scale)
    assert torch.equal(losses, OPS.linear_cross_entropy(hidden, weight, targets).detach())
    assert total.requires_grad == (trained != "nothing")
    if trained != "nothing":
        total.backward()
        assert {name for name, leaf in leaves.items() if leaf.grad is not None} == {trained}


def test_a_second_backward_pass_is_refused(backend):
    hidden, weight, targets, scale = case(backend.runtime.device, 5, 8, 9, torch.float32)
    total, _ = OPS.weighted_cross_entropy(hidden.requires_grad_(), weight, targets, scale)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        total.backward()


def test_no_rows_and_extreme_logits(backend):
    device = backend.runtime.device
    hidden, weight, targets, scale = case(device, 3, 8, 9, torch.float32)
    total, losses = OPS.weighted_cross_entropy(hidden[:0], weight, targets[:0], scale[:0])
    assert (total.item(), losses.shape) == (0, (0,))
    leaf = weight.clone().requires_grad_()
    OPS.weighted_cross_entropy(hidden[:0], leaf, targets[:0], scale[:0])[0].backward()
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))
    far = torch.tensor([[1e4], [-1e4], [0.0]], device=device)
    rising = torch.arange(9.0, device=device)[:, None]
    found = OPS.linear_cross_entropy(far, rising, torch.tensor([8, 0, 4], device=device)).cpu()
    np.testing.assert_allclose(found.numpy(), [0, 0, np.log(9)], atol=1e-6)
    assert OPS.linear_cross_entropy(far * float("nan"), rising, targets).isnan().all()
