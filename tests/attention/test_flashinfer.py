"""Prefill through FlashInfer: what it is asked for, on a stand-in that follows its documentation; on a device, its numbers."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from polyrec.attention.layout import packed_layout
from polyrec.core.errors import HardwareError
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.base.attention import AttentionNeeds
from polyrec.testing import attention_checks as checks
from polyrec.testing.conformance import AttentionConformance

BF16 = torch.bfloat16
INSTALLED = importlib.util.find_spec("flashinfer") is not None
on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Triton, which it stands on, is for Linux only"
)
on_device = pytest.mark.skipif(
    not (torch.cuda.is_available() and INSTALLED), reason="needs flashinfer, and a device that torch shows as cuda"
)


def attention_by_hand(query, key, value, lengths, window=None, soft_cap=None):
    """Packed causal attention, in the dtype of its inputs: [T, heads, D], [T, kv heads, D] -> [T, heads, D]."""
    parts = []
    for q, k, v in zip(*(part.split(lengths) for part in (query, key, value)), strict=True):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(q), device=q.device)
        hidden = (distance < 0) | (distance >= (len(q) if window is None else window))
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(parts)


class Wrapper:
    """Follows the documentation of `BatchPrefillWithRaggedKVCacheWrapper`, on the host, in float64."""

    log: list

    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self, starts, key_starts, heads, kv_heads, head_dim, *,
        causal, window_left, logits_soft_cap, q_data_type, disable_split_kv,
    ):  # fmt: skip
        assert starts.dtype == key_starts.dtype == torch.int32
        assert starts.device.type == "cpu", "reading them from a device would wait for it"
        assert torch.equal(starts, key_starts)
        assert (causal, disable_split_kv) == (True, True)
        self.expected = (heads, kv_heads, head_dim, q_data_type)
        self.lengths = (starts[1:] - starts[:-1]).tolist()
        self.window = None if window_left < 0 else window_left + 1
        self.soft_cap = logits_soft_cap
        self.log.append("plan")

    def run(self, q, k, v):
        assert (q.shape[1], k.shape[1], q.shape[2], q.dtype) == self.expected
        self.log.append([(part.data_ptr(), part.stride()) for part in (q, k, v)])
        return attention_by_hand(q.double(), k.double(), v.double(), self.lengths, self.window, self.soft_cap).to(
            q.dtype
        )


class Event:
    log: list

    def __init__(self, device):
        pass

    def synchronize(self):
        self.log.append("wait")

    def record(self):
        self.log.append("record")


@pytest.fixture
def log(monkeypatch):
    """What the stand-ins were asked for, in order."""
    log: list = []
    monkeypatch.setattr(Wrapper, "log", log, raising=False)
    monkeypatch.setattr(Event, "log", log, raising=False)
    return log


@pytest.fixture
def module(monkeypatch, log):
    """`polyrec.attention.flashinfer` on the stand-in."""
    library = SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper, __version__="0")
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.delitem(sys.modules, "polyrec.attention.flashinfer", raising=False)
    monkeypatch.setattr(torch, "Event", Event)
    module = importlib.import_module("polyrec.attention.flashinfer")
    monkeypatch.setattr(module.FlashInferAttention, "device", "cpu")
    yield module
    sys.modules.pop("polyrec.attention.flashinfer")


@pytest.fixture
def hardware():
    return build_hardware_backend(HardwareConfig(hardware_platform="cpu"))


def needs(**more):
    return AttentionNeeds(2, 4, 2, 64, dtype=BF16, **more)


def planned(lengths, **more):
    return packed_layout(torch.tensor(lengths), **more)


@on_linux
@pytest.mark.parametrize("options", [{}, {"sliding_window": 1}, {"sliding_window": 4}, {"soft_cap": 1.5}], ids=str)
def test_it_is_asked_for_each_sequence_with_its_window_and_cap(module, hardware, options):
    checks.check_packed(module.FlashInferAttention, hardware, needs(**options))


@on_linux
def test_keys_and_values_are_kept_once_and_all_are_read_where_they_lie(module, hardware, log):
    checks.check_cache(module.FlashInferAttention, hardware, needs())
    plan = module.FlashInferAttention(needs(), hardware.ops).packed(planned([3, 1]))
    rows = checks.split(torch.randn(4, 8 * 64).to(BF16), needs())
    plan.run(0, *rows)
    assert log[-1] == [(part.data_ptr(), part.stride()) for part in rows]
    assert not rows.query.is_contiguous()


@on_linux
def test_a_batch_is_planned_once_and_not_over_a_plan_that_is_still_being_copied(module, hardware, log):
    attention = module.FlashInferAttention(needs(), hardware.ops)
    log.clear()
    plan = attention.packed(planned([2, 5]))
    for layer in range(2):
        plan.run(layer, *checks.split(torch.randn(7, 8 * 64).to(BF16), needs()))
    assert [entry for entry in log if isinstance(entry, str)] == ["wait", "plan", "record"]


@on_linux
def test_a_plan_outlives_the_next_and_no_later_one(module, hardware):
    attention = module.FlashInferAttention(needs(), hardware.ops)
    rows = checks.split(torch.randn(3, 8 * 64).to(BF16), needs())
    plan = attention.packed(planned([3]))
    expected = plan.run(0, *rows)
    attention.packed(planned([1, 2]))
    assert torch.equal(plan.run(0, *rows), expected)
    attention.packed(planned([1, 1, 1]))
    with pytest.raises(AssertionError, match="later batches"):
        plan.run(0, *rows)


@on_linux
def test_lengths_that_only_the_device_knows_and_branches_go_elsewhere(module, hardware, log):
    from polyrec.attention import sdpa, triton

    attention = module.FlashInferAttention(needs(), hardware.ops)
    log.clear()
    unknown = triton.PackedLayout(lengths=torch.tensor([2, 1]), longest=4, num_tokens=8)
    assert type(attention.packed(unknown)) is triton.PackedPlan
    assert type(attention.packed(planned([3], branch=torch.tensor([0, 1, 2])))) is sdpa.PackedPlan
    assert log == []


@on_linux
def test_kernels_that_cannot_be_compiled_stop_the_build(module, hardware, monkeypatch):
    def plan(*_, **__):
        raise RuntimeError("nvcc is not found")

    monkeypatch.setattr(Wrapper, "plan", plan)
    with pytest.raises(HardwareError, match="nvcc is not found") as caught:
        module.FlashInferAttention(needs(), hardware.ops)
    assert caught.value.code == "attention_kernels_failed"
    assert "--attention triton" in caught.value.remedy
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.gpu
@on_device
class TestFlashInfer(AttentionConformance):
    platform = "nvidia"
    attention = "flashinfer"


@pytest.fixture
def nvidia():
    return build_hardware_backend(HardwareConfig(hardware_platform="nvidia", attention="flashinfer"))


LONG = [1, 127, 129, 700, 1025]


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize(
    ("heads", "head_dim", "options"),
    [((16, 8), 128, {}), ((4, 2), 64, {"sliding_window": 100}), ((4, 2), 64, {"soft_cap": 1.5})],
    ids=["plain", "window", "soft cap"],
)
def test_sequences_of_many_blocks(nvidia, heads, head_dim, options):
    asked = AttentionNeeds(1, *heads, head_dim, dtype=BF16, **options)
    layout = packed_layout(torch.tensor(LONG), to_device=nvidia.runtime.to_device)
    fused = torch.randn(sum(LONG), (heads[0] + 2 * heads[1]) * head_dim, device=nvidia.runtime.device).to(BF16)
    rows = checks.split(fused, asked)
    with torch.no_grad():
        found = nvidia.attention.build(asked, nvidia.ops).packed(layout).run(0, *rows).double()
    expected = attention_by_hand(
        *(part.double() for part in rows), LONG, asked.sliding_window, asked.soft_cap
    ).flatten(1)  # fmt: skip
    assert float((found - expected).norm() / expected.norm()) < 5e-3
    assert float((found - expected).abs().max()) < 0.05


@pytest.mark.gpu
@on_device
def test_a_sequence_gets_the_same_bits_alone_and_among_others(nvidia):
    asked = AttentionNeeds(1, 16, 8, 128, dtype=BF16)
    attention = nvidia.attention.build(asked, nvidia.ops)
    fused = torch.randn(sum(LONG), 32 * 128, device=nvidia.runtime.device).to(BF16)
    with torch.no_grad():
        together = attention.packed(packed_layout(torch.tensor(LONG), to_device=nvidia.runtime.to_device)).run(
            0, *checks.split(fused, asked)
        )
        for part, expected in zip(fused.split(LONG), together.split(LONG), strict=True):
            layout = packed_layout(torch.tensor([len(part)]), to_device=nvidia.runtime.to_device)
            assert torch.equal(attention.packed(layout).run(0, *checks.split(part, asked)), expected)
