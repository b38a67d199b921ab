"""Prefill through FlashInfer: what it is asked for, on a stand-in that follows its documentation; on a device, its numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from flashinfer_stand_in import Ragged, attention_by_hand, on_device, on_linux

from polyrec.attention.layout import packed_layout
from polyrec.attention.sdpa import SdpaAttention
from polyrec.core.errors import HardwareError
from polyrec.hardware.base.attention import AttentionNeeds, PackedLayout, PageTable
from polyrec.kvcache.pool import KVPool
from polyrec.testing import attention_checks as checks
from polyrec.testing.conformance import AttentionConformance

BF16 = torch.bfloat16


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
    assert log == [], "the host works when the device has something to do"
    for layer in range(2):
        plan.run(layer, *checks.split(torch.randn(7, 8 * 64).to(BF16), needs()))
    assert [entry for entry in log if isinstance(entry, str)] == ["wait", "plan", "record"]


@on_linux
def test_a_batch_of_the_last_lengths_takes_the_plan_that_is_there(module, hardware, log):
    """In each of the slots that take turns; and what comes of it is that batch's."""
    attention = module.FlashInferAttention(needs(), hardware.ops)
    log.clear()
    for lengths, times in (([3, 1], 2), ([3, 1], 2), ([3, 1], 2), ([1, 3], 3), ([4], 4), ([1, 3], 4)):
        rows = checks.split(torch.randn(4, 8 * 64).to(BF16), needs())
        found = attention.packed(planned(lengths)).run(0, *rows)
        expected = attention_by_hand(*(part.double().split(lengths) for part in rows)).flatten(1)
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
        assert log.count("plan") <= times
    assert log.count("plan") == 4


@on_linux
def test_a_plan_outlives_the_next_and_no_later_one(module, hardware):
    attention = module.FlashInferAttention(needs(), hardware.ops)
    rows = checks.split(torch.randn(3, 8 * 64).to(BF16), needs())
    plan = attention.packed(planned([3]))
    expected = plan.run(0, *rows)
    attention.packed(planned([1, 2])).run(0, *rows)
    assert torch.equal(plan.run(0, *rows), expected)
    attention.packed(planned([1, 1, 1])).run(0, *rows)
    with pytest.raises(AssertionError, match="later batches"):
        plan.run(0, *rows)


def kept(lengths, cached, size=4):
    """A host table of prompts of which `cached` tokens are there, in pages of no order, and a cache for it."""
    whole = torch.tensor(lengths) + torch.tensor(cached)
    pages = torch.randperm(len(lengths) * 8).reshape(len(lengths), 8).int() + 1
    table = PageTable(pages, size, int(whole.max()), torch.tensor(cached))
    return table, KVPool(2, (pages.numel() + 1) * size, 2, 64, BF16, torch.device("cpu"))


@on_linux
@pytest.mark.parametrize("options", [{}, {"sliding_window": 1}, {"sliding_window": 4}, {"soft_cap": 1.5}], ids=str)
def test_the_rest_of_a_prompt_is_asked_for_with_the_pages_of_all(module, hardware, log, options, monkeypatch):
    """Last rows, whose lengths the device alone knows, are left to Triton's plan, for which torch's stands in here."""
    from polyrec.attention import triton

    by_torch = lambda attention, *given: SdpaAttention(attention.needs, attention.ops).packed(*given)  # noqa: E731
    monkeypatch.setattr(triton.TritonAttention, "packed", by_torch)
    checks.check_page_writes(module.FlashInferAttention, hardware, needs(**options))
    log.clear()
    checks.check_prefix(module.FlashInferAttention, hardware, needs(**options))
    assert [entry for entry in log if isinstance(entry, str)] == [
        "wait", "plan", "record",  # the build's
        "wait", "plan pages", "record", "wait", "plan pages", "record",
    ]  # fmt: skip


@on_linux
def test_pages_are_read_where_they_lie(module, hardware, log):
    table, pool = kept([3, 1], [5, 8])
    plan = module.FlashInferAttention(needs(), hardware.ops).packed(planned([3, 1], table=table), pool)
    rows = checks.split(torch.randn(4, 8 * 64).to(BF16), needs())
    plan.run(1, *rows)
    query, *pages = log[-1]
    assert query == (rows.query.data_ptr(), rows.query.stride())
    assert pages == [(part.data_ptr(), (4 * 128, 128, 64, 1)) for part in pool.layer(1)]


@pytest.fixture
def tritons(monkeypatch):
    """Layouts that were left to Triton's plan."""
    from polyrec.attention import triton

    layouts: list = []
    monkeypatch.setattr(triton.TritonAttention, "packed", lambda self, layout, cache=None: layouts.append(layout))
    return layouts


@on_linux
def test_what_only_the_device_knows_and_branches_go_elsewhere(module, hardware, log, tritons):
    attention = module.FlashInferAttention(needs(), hardware.ops)
    log.clear()
    table, pool = kept([2, 1], [4, 0])
    unknown = PackedLayout(torch.tensor([2, 1]), longest=4, num_tokens=8)
    lengths_only = PackedLayout(torch.tensor([2, 1]), 2, 3, host_lengths=torch.tensor([2, 1]), table=table)
    given = [unknown, planned([3], branch=torch.tensor([0, 1, 2])), lengths_only]
    for layout in given:
        attention.packed(layout, pool)
    assert tritons == given
    assert log == []


@on_linux
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16])
def test_a_prefix_in_a_cache_of_another_dtype_goes_elsewhere_and_a_whole_prompt_does_not(
    module, hardware, log, tritons, dtype
):
    attention = module.FlashInferAttention(needs(), hardware.ops)
    table, _ = kept([2, 1], [4, 0])
    pool = KVPool(2, 68, 2, 64, dtype, torch.device("cpu"))
    layout = planned([2, 1], table=table)
    attention.packed(layout, pool)
    assert tritons == [layout]
    log.clear()
    whole = planned([2, 1], table=dataclasses.replace(table, cached=None))
    plan = attention.packed(whole, pool)
    rows = checks.split(torch.randn(3, 8 * 64).to(BF16), needs())
    out = plan.run(0, *rows)
    assert "plan" in log
    expected = attention_by_hand(*(part.double().split([2, 1]) for part in rows)).flatten(1)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(pool.layer(0)[0][whole.slots].float(), rows.key.to(dtype).float())


@on_linux
def test_plans_of_both_kinds_take_turns(module, hardware):
    attention = module.FlashInferAttention(needs(), hardware.ops)
    table, pool = kept([3], [5])
    rows = checks.split(torch.randn(3, 8 * 64).to(BF16), needs())
    plan = attention.packed(planned([3], table=table), pool)
    expected = plan.run(0, *rows)
    attention.packed(planned([1, 2])).run(0, *rows)
    assert torch.equal(plan.run(0, *rows), expected)
    attention.packed(planned([3], table=table), pool).run(0, *rows)
    with pytest.raises(AssertionError, match="later batches"):
        plan.run(0, *rows)


@on_linux
def test_a_captured_prefill_is_laid_out_anew_for_each_batch(module, hardware, log):
    attention = module.FlashInferAttention(needs(), hardware.ops)
    assert attention.host_plan(1024, 4) is None, "left to Triton, whose plan the device makes"
    host_plan = attention.host_plan(1100, 4)
    pool = KVPool(2, 1104, 2, 64, BF16, torch.device("cpu"))
    rows = checks.split(torch.randn(1100, 8 * 64).to(BF16), needs())
    lengths = torch.zeros(4, dtype=torch.int64)  # on a device, where the plan does not look
    plan = attention.packed(PackedLayout(lengths, 1100, 1100, host_plan=host_plan), pool)
    log.clear()
    for batch in ([1100], [3, 500, 1], [20, 1, 7, 1000]):
        host_plan.renew(torch.tensor(batch))
        found = plan.run(0, *rows).double().split([*batch, 1100 - sum(batch)])
        parts = (part.double().split([*batch, 1100 - sum(batch)])[: len(batch)] for part in rows)
        expected = attention_by_hand(*parts).flatten(1)
        torch.testing.assert_close(torch.cat(found[: len(batch)]), expected, rtol=2e-2, atol=2e-2)
        assert torch.isfinite(found[-1]).all(), "rows of no prompt are written too"
    assert [entry for entry in log if isinstance(entry, str)] == ["wait", "plan", "record"] * 3


@on_linux
def test_a_captured_plan_that_still_holds_is_kept(module, hardware, log, monkeypatch):
    """It follows from the lengths alone; one that was begun and failed does not hold."""
    host_plan = module.FlashInferAttention(needs(), hardware.ops).host_plan(1100, 4)
    log.clear()
    for batch in ([300, 200], [300, 200], [300], [300, 200], [200, 300], [200, 300]):
        host_plan.renew(torch.tensor(batch))
    assert log.count("plan") == 4
    assert host_plan.ragged.lengths == [200, 300, 0, 0, 600]
    keep = host_plan.ragged.keep
    monkeypatch.setattr(host_plan.ragged, "keep", lambda *given, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        host_plan.renew(torch.tensor([1000]))
    monkeypatch.setattr(host_plan.ragged, "keep", keep)
    host_plan.renew(torch.tensor([200, 300]))
    assert host_plan.ragged.lengths == [200, 300, 0, 0, 600]
    assert log.count("plan") == 5


@on_linux
@pytest.mark.parametrize(("heads", "num_tokens"), [(4, 1100), (256, 65_536)])
def test_a_captured_plan_has_room_for_every_piece(module, hardware, heads, num_tokens):
    asked = AttentionNeeds(2, heads, 2, 64, dtype=BF16)
    slot = module.CapturedSlot(torch.empty(8, dtype=torch.uint8), asked, num_tokens, 32)
    slot.renew(torch.tensor([num_tokens]))  # the stand-in looks


@on_linux
def test_plans_are_renewed_only_for_kernels_that_read_nothing_else(module, hardware, monkeypatch):
    monkeypatch.setattr(module.flashinfer.utils, "is_sm90a_supported", lambda device: False)
    assert module.FlashInferAttention(needs(), hardware.ops).host_plan(4096, 4) is None


@on_linux
def test_kernels_that_cannot_be_compiled_stop_the_build(module, hardware, monkeypatch):
    def plan(*_, **__):
        raise RuntimeError("nvcc is not found")

    monkeypatch.setattr(Ragged, "plan", plan)
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
    parts = (part.double().split(LONG) for part in rows)
    expected = attention_by_hand(*parts, asked.sliding_window, asked.soft_cap).flatten(1)
    assert float((found - expected).norm() / expected.norm()) < 5e-3
    assert float((found - expected).abs().max()) < 0.05


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"soft_cap": 1.5}], ids=str)
def test_long_prompts_go_on_from_what_is_cached(nvidia, options):
    """Pages of the size that serving has, rests and prefixes of many blocks."""
    asked = AttentionNeeds(1, 16, 8, 128, dtype=BF16, **options)
    rest, cached = torch.tensor([1, 127, 129, 700, 1025]), torch.tensor([2440, 0, 16, 1000, 3000])
    whole, size = rest + cached, 16
    counts = (whole + size - 1) // size
    numbers = (torch.randperm(int(counts.sum())) + 1).int()
    pages = torch.nn.utils.rnn.pad_sequence(numbers.split(counts.tolist()), batch_first=True)
    table = PageTable(pages, size, int(whole.max()), cached)
    layout = packed_layout(rest, to_device=nvidia.runtime.to_device, table=table)
    pool = KVPool(1, (len(numbers) + 1) * size, 8, 128, BF16, nvidia.runtime.device)
    fused = torch.randn(int(whole.sum()), 32 * 128, device=nvidia.runtime.device).to(BF16)
    slots = torch.cat([layout.prompt_slots[row, :length] for row, length in enumerate(whole.tolist())])
    nvidia.ops.kv.write(*checks.split(fused, asked)[1:], *pool.layer(0), slots)
    last = torch.cat([torch.arange(end - num, end) for end, num in zip(whole.cumsum(0), rest, strict=True)])
    with torch.no_grad():
        rows = checks.split(fused[last.to(fused.device)], asked)
        found = nvidia.attention.build(asked, nvidia.ops).packed(layout, pool).run(0, *rows).double()
    keys, values = (part.double().split(whole.tolist()) for part in checks.split(fused, asked)[1:])
    query = rows.query.double().split(rest.tolist())
    expected = attention_by_hand(query, keys, values, asked.sliding_window, asked.soft_cap).flatten(1)
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


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"soft_cap": 1.5}], ids=str)
def test_replays_of_a_captured_prefill_give_what_launches_give(nvidia, options):
    """To the bit, whatever other batch it was captured or replayed for."""
    asked = AttentionNeeds(1, 16, 8, 128, dtype=BF16, **options)
    attention, device = nvidia.attention.build(asked, nvidia.ops), nvidia.runtime.device
    host_plan, places, num_tokens = attention.host_plan(4096, 8), torch.zeros(8, dtype=torch.int64, device=device), 4096
    fused = torch.randn(num_tokens, 32 * 128, device=device).to(BF16)
    rows = checks.split(fused, asked)
    host_plan.renew(torch.tensor([num_tokens]))
    layout = PackedLayout(places, num_tokens, num_tokens, host_plan=host_plan)
    with torch.inference_mode():
        graph = nvidia.graph.capture(lambda: attention.packed(layout).run(0, *rows))
        for batch in (LONG, [4096], [1], [300] * 8, LONG):
            fused.normal_()
            host_plan.renew(torch.tensor(batch))
            found, total = graph.replay(), sum(batch)
            launched = attention.packed(packed_layout(torch.tensor(batch), to_device=nvidia.runtime.to_device))
            assert torch.equal(found[:total], launched.run(0, *(part[:total] for part in rows)))
            assert torch.isfinite(found).all()
    graph.close()
