"""Angles, merged projections, norms with the residual pair, and the feed-forward block, against arithmetic written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from polyrec.hardware.base.attention import AttentionPlan
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.layers.attention import Attention
from polyrec.layers.choices import LayerChoices
from polyrec.layers.linear import Linear
from polyrec.layers.mlp import GatedMLP
from polyrec.layers.norm import RMSNorm
from polyrec.layers.rotary import RotaryAngles


@pytest.mark.parametrize(("dim", "theta"), [(2, 1e4), (16, 1e4), (64, 1e6)])
def test_angles_equal_float64(dim, theta):
    positions = torch.tensor([0, 1, 17, 4095])
    cos, sin = RotaryAngles(dim, theta)(positions)
    angle = positions.double().numpy()[:, None] / theta ** (np.arange(0, dim, 2) / dim)
    assert cos.shape == sin.shape == (4, dim // 2)
    # fp32 holds an angle of 4,095 to about 2e-4 radians.
    np.testing.assert_allclose(cos.numpy(), np.cos(angle), atol=5e-4)
    np.testing.assert_allclose(sin.numpy(), np.sin(angle), atol=5e-4)
    np.testing.assert_allclose(cos[:2].numpy(), np.cos(angle[:2]), atol=1e-6)


def test_angles_equal_transformers_and_stay_fp32():
    config = transformers.Qwen3Config(head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    positions = torch.randint(0, 4096, (50,), generator=torch.Generator().manual_seed(0))
    theirs = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = RotaryAngles(32, 1e6).to(torch.float32)
    for found, their in zip(ours(positions), theirs, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, their[0, :, :16], rtol=0, atol=1e-6)
    assert not ours.state_dict()  # follows from the config, so it is not saved


def test_angles_of_a_model_cast_to_half_stay_exact():
    positions = torch.tensor([3, 2000])
    for cast in (RotaryAngles(64, 1e6).to(torch.bfloat16), RotaryAngles(64, 1e6).half()):
        for found, expected in zip(cast(positions), RotaryAngles(64, 1e6)(positions), strict=True):
            assert found.dtype == torch.float32
            assert torch.equal(found, expected)


def test_angles_of_a_model_built_on_no_device_are_there_once_it_has_one():
    with torch.device("meta"):
        angles = RotaryAngles(64, 1e6)
    found = angles.to_empty(device="cpu")(torch.arange(5))
    assert torch.equal(found[0], RotaryAngles(64, 1e6)(torch.arange(5))[0])


@pytest.mark.parametrize("bias", [False, True])
def test_merged_projections_are_the_separate_ones(bias):
    torch.manual_seed(0)
    sizes = (6, 3, 2)
    merged = Linear(5, sizes, bias=bias, ops=REFERENCE_OPS.linear)
    assert (merged.bias is not None) == bias
    with torch.no_grad():
        for parameter in merged.parameters():
            parameter.normal_()
    x = torch.randn(4, 5)
    biases = merged.bias.split(sizes) if bias else [None] * 3
    assert merged.parts == sizes
    for found, weight, offset in zip(merged(x).split(sizes, -1), merged.weight.split(sizes), biases, strict=True):
        expected = x.double() @ weight.double().T + (offset.double() if bias else 0)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_a_module_uses_the_ops_it_was_given():
    calls = []

    def mm(x, weight, bias):
        calls.append(tuple(weight.shape))
        return REFERENCE_OPS.linear.mm(x, weight, bias)

    ops = replace(REFERENCE_OPS, linear=replace(REFERENCE_OPS.linear, mm=mm))
    mlp = GatedMLP(4, 6, ops=ops)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    mlp(torch.randn(3, 4))
    assert calls == [(12, 4), (4, 6)]  # one product for gate and up, one down


def test_norm_opens_and_carries_the_residual():
    torch.manual_seed(1)
    norm = RMSNorm(8, 1e-5, REFERENCE_OPS.norm)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)

    def expected(total):
        return total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()

    opened, stream = norm(x, None)
    assert stream is x
    torch.testing.assert_close(opened.double(), expected(x.double()), atol=1e-5, rtol=0)
    normed, stream = norm(x, residual)
    torch.testing.assert_close(stream, x + residual)
    torch.testing.assert_close(normed.double(), expected(x.double() + residual.double()), atol=1e-5, rtol=0)


def test_feed_forward():
    torch.manual_seed(2)
    mlp = GatedMLP(6, 10, ops=REFERENCE_OPS)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 6)
    gate, up = (x.double() @ part.double().T for part in mlp.gate_up_proj.weight.split(10))
    expected = (gate * torch.sigmoid(gate) * up) @ mlp.down_proj.weight.double().T
    torch.testing.assert_close(mlp(x).double(), expected, atol=1e-4, rtol=1e-5)


class RecordingPlan(AttentionPlan):
    """Keeps what the block hands to attention, and answers with the values of each query head's group."""

    def run(self, layer, query, key, value):
        self.seen = (layer, query, key, value)
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).flatten(1)


class RotatingPlan(RecordingPlan):
    """Turns queries and keys itself."""

    rotates = True

    def run_product(self, layer, query, key, value, rotation):
        self.rotation = rotation
        weights = rotation.query_weight, rotation.key_weight
        turned = REFERENCE_OPS.rope.qk_norm_rotary(query, key, *weights, rotation.cos, rotation.sin, rotation.eps)
        return self.run(layer, *turned, value)


@pytest.mark.parametrize(
    ("choices", "leaves"),
    [
        (LayerChoices(), True),
        (LayerChoices(fused_qk_rope_kv=False), False),
        (LayerChoices(rope_is_replaced=True), False),
    ],
)
def test_attention_block_leaves_rotation_to_a_plan_that_does_it(choices, leaves):
    torch.manual_seed(4)
    block = Attention(0, 12, 4, 2, 6, eps=1e-6, bias=True, ops=REFERENCE_OPS, choices=choices)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    x, plan, apart = torch.randn(5, 12), RotatingPlan(), RecordingPlan()
    angles = RotaryAngles(6, 1e4)(torch.arange(5))
    torch.testing.assert_close(block(x, angles, plan), block(x, angles, apart), rtol=0, atol=0)
    assert all(torch.equal(one, other) for one, other in zip(plan.seen[1:], apart.seen[1:], strict=True))
    assert hasattr(plan, "rotation") == leaves


def test_attention_block_asks_its_plan():
    torch.manual_seed(3)
    block = Attention(7, 12, 4, 2, 6, eps=1e-6, bias=True, ops=REFERENCE_OPS)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    x, plan = torch.randn(5, 12), RecordingPlan()
    angles = RotaryAngles(6, 1e4)(torch.arange(5))
    found = block(x, angles, plan)
    layer, query, key, value = plan.seen
    assert layer == 7
    assert (query.shape, key.shape, value.shape) == ((5, 4, 6), (5, 2, 6), (5, 2, 6))
    q, k, v = (x @ block.qkv_proj.weight.T + block.qkv_proj.bias).split((24, 12, 12), -1)
    torch.testing.assert_close(value, v.view(5, 2, 6))
    # Norms set each head's length; turning keeps it.
    unweighted = q.view(5, 4, 6) / (q.view(5, 4, 6).square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(query.norm(dim=-1), (unweighted * block.q_norm.weight).norm(dim=-1))
    assert not torch.allclose(key[0].norm(dim=-1), k.view(5, 2, 6)[0].norm(dim=-1))
    expected = value.repeat_interleave(2, dim=1).flatten(1) @ block.o_proj.weight.T + block.o_proj.bias
    torch.testing.assert_close(found, expected)
