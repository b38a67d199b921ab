"""Routing and experts against transformers' Qwen3-MoE block and plain loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from polyrec.hardware.ops import REFERENCE_OPS

OPS = REFERENCE_OPS.moe


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chosen(rows, num_experts, top_k, seed):
    return torch.rand(rows, num_experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, :top_k]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route_in_float64(dtype, renormalize):
    logits = draw(9, 12, seed=0).to(dtype)
    weights, experts = OPS.route(logits, 3, renormalize)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    probability = np.exp(logits.double().numpy())
    probability /= probability.sum(1, keepdims=True)
    for row in range(9):
        order = sorted(range(12), key=lambda expert: (-probability[row, expert], expert))[:3]
        assert experts[row].tolist() == order
        kept = probability[row, order]
        np.testing.assert_allclose(weights[row].numpy(), kept / kept.sum() if renormalize else kept, atol=1e-6)


def test_route_takes_the_lower_of_equal_experts():
    weights, experts = OPS.route(torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0]]), 3, True)
    assert experts.tolist() == [[1, 3, 0]]
    assert weights[0, 0] == weights[0, 1]


@pytest.mark.parametrize(("rows", "num_experts", "top_k"), [(1, 1, 1), (7, 4, 2), (20, 9, 3), (0, 4, 2)])
def test_permute_in_plain_python(rows, num_experts, top_k):
    x, experts = draw(rows, 5, seed=1), chosen(rows, num_experts, top_k, seed=2)
    copies, order, sizes = OPS.permute(x, experts, num_experts)
    wanted = sorted(range(rows * top_k), key=lambda place: (int(experts.flatten()[place]), place))
    assert order.tolist() == wanted
    assert torch.equal(copies, x[[place // top_k for place in wanted]])
    assert sizes.tolist() == [int((experts == expert).sum()) for expert in range(num_experts)]
    assert order.dtype == sizes.dtype == torch.int64


def test_experts_in_float64():
    rows, num_experts, top_k, dim, inner = 11, 5, 2, 8, 6
    x, weights = draw(rows, dim, seed=3), draw(rows, top_k, seed=4).abs()
    experts = chosen(rows, num_experts - 1, top_k, seed=5)  # nobody asks for the last one
    gate_up, down = draw(num_experts, 2 * inner, dim, seed=6), draw(num_experts, dim, inner, seed=7)
    expected = np.zeros((rows, dim))
    for row in range(rows):
        for place in range(top_k):
            expert = int(experts[row, place])
            gate, up = np.split(gate_up[expert].double().numpy() @ x[row].double().numpy(), 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            expected[row] += float(weights[row, place]) * (down[expert].double().numpy() @ hidden)
    found = OPS.experts(x, weights, experts, gate_up, down)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


def stacked(state, num_experts):
    """gate_up and down of all experts; transformers stacks them itself from version 5 on."""
    if "experts.gate_up_proj" in state:
        return state["experts.gate_up_proj"], state["experts.down_proj"]
    gate, up, down = (
        torch.stack([state[f"experts.{expert}.{name}_proj.weight"] for expert in range(num_experts)])
        for name in ("gate", "up", "down")
    )
    return torch.cat((gate, up), 1), down


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_block_equals_transformers(renormalize):
    config = Qwen3MoeConfig(
        hidden_size=16,
        moe_intermediate_size=12,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=renormalize,
        hidden_act="silu",
    )
    block = Qwen3MoeSparseMoeBlock(config)
    for seed, parameter in enumerate(block.parameters()):
        parameter.data.copy_(draw(*parameter.shape, seed=seed) / 4)
    x = draw(2, 7, 16, seed=8)
    flat, state = x.reshape(14, 16), block.state_dict()
    weights, experts = OPS.route(flat @ state["gate.weight"].T, 2, renormalize)
    found = OPS.experts(flat, weights, experts, *stacked(state, 6))
    theirs = block(x)
    torch.testing.assert_close(found.view_as(x), (theirs[0] if isinstance(theirs, tuple) else theirs).detach())


def test_gradients():
    logits, x = draw(5, 4, seed=9).double().requires_grad_(), draw(5, 3, seed=10).double().requires_grad_()
    gate_up, down = draw(4, 4, 3, seed=11).double().requires_grad_(), draw(4, 3, 2, seed=12).double().requires_grad_()

    def block(logits, x, gate_up, down):
        weights, experts = OPS.route(logits, 2, True)
        return OPS.experts(x, weights, experts, gate_up, down)

    assert torch.autograd.gradcheck(block, (logits, x, gate_up, down))
    experts = chosen(5, 4, 2, seed=13)
    assert torch.autograd.gradcheck(lambda rows: OPS.permute(rows, experts, 4)[0], (x,))
