"""What the CPU cannot show, on the toy accelerator: frozen lengths, a graph budget, missing operations, refused features."""

from __future__ import annotations

import logging

import pytest
import torch
from toy_platform import MAX_GRAPHS

from polyrec.core.errors import HardwareError
from polyrec.core.registry import Registry
from polyrec.engine.recommender import Recommender
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.base import registry
from polyrec.hardware.ops.check import check_op
from polyrec.hardware.table import all_specs
from polyrec.testing.tiny import write_tiny_model


@pytest.fixture
def toy(monkeypatch):
    """Registers the toy beside the CPU; -> builds it with the given settings."""
    platforms = Registry("platform", {"cpu": registry.platform_path("cpu"), "toy": "toy_platform:ToyBackend"})
    monkeypatch.setattr(registry, "_PLATFORMS", platforms)
    return lambda **config: build_hardware_backend(HardwareConfig(**config))


def code_of(call) -> tuple[str, str]:
    with pytest.raises(HardwareError) as caught:
        call()
    return caught.value.code, str(caught.value)


def test_auto_takes_it(toy):
    assert toy().platform_name == "toy"


@pytest.mark.parametrize(("device", "index"), [("toy", 0), ("toy:1", 1)])
def test_a_device_is_chosen_by_its_index(toy, device, index):
    assert toy(device=device).runtime.device_name() == f"toy {index}"


def test_there_are_two_devices(toy):
    code, text = code_of(lambda: toy(device="toy:2"))
    assert code == "device_index"
    assert "0…1" in text


def test_a_replay_has_the_lengths_of_its_capture_until_they_are_updated(toy):
    """As on platforms whose attention takes lengths from the host: the sums of rows of `length` numbers."""
    graph = toy().graph
    numbers, lengths, sums = torch.arange(8.0).reshape(2, 4), torch.tensor([2, 3]), torch.empty(2)

    def add_up():
        def kernel(own):
            for row, length in enumerate(own):
                sums[row] = numbers[row, :length].sum()

        graph.task("lengths", lengths.tolist() if frozen is None else frozen, kernel)
        return sums

    frozen = [2, 3]  # reading a tensor on the host is no part of a capture
    captured = graph.capture(add_up)
    assert captured.replay().tolist() == [0 + 1, 4 + 5 + 6]
    numbers += 10
    lengths.copy_(torch.tensor([4, 1]))
    assert captured.replay().tolist() == [10 + 11, 14 + 15 + 16], "buffers are read anew, lengths are not"
    captured.update({"other": torch.tensor([1, 1])})
    assert captured.replay().tolist() == [10 + 11, 14 + 15 + 16]
    captured.update({"lengths": lengths})
    assert captured.replay().tolist() == [10 + 11 + 12 + 13, 14]


def test_two_graphs_keep_their_own_lengths(toy):
    graph, out = toy().graph, torch.empty(1)

    def capture(length):
        return graph.capture(lambda: graph.task("lengths", [length], lambda own: out.fill_(own[0])) or out)

    first, second = capture(1), capture(2)
    second.update({"lengths": torch.tensor([7])})
    assert first.replay().item() == 1
    assert second.replay().item() == 7


def test_graphs_run_out_and_come_back(toy):
    graph = toy().graph
    graphs = [graph.capture(lambda: torch.ones(1)) for _ in range(MAX_GRAPHS)]
    assert graph.budget() == 0
    assert code_of(lambda: graph.capture(lambda: torch.ones(1)))[0] == "graph_budget_exhausted"
    graphs[0].close()
    assert graph.budget() == 1
    assert graph.capture(lambda: torch.full((1,), 3.0)).replay().item() == 3


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: x[x > 0], "index"),
        (lambda x: torch.repeat_interleave(x, x.long()), "repeat_interleave"),
    ],
)
def test_what_needs_the_host_cannot_be_captured(toy, operation, name):
    graph = toy().graph
    x = torch.ones(3)
    code, text = code_of(lambda: graph.capture(lambda: operation(x)))
    assert code == "graph_capture_failed"
    assert name in text
    assert graph.budget() == MAX_GRAPHS, "a failed capture takes no place"


def test_a_replay_draws_new_random_numbers(toy):
    captured = toy().graph.capture(lambda: torch.rand(4))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(captured.replay(), expected)
    assert not torch.equal(captured.replay().clone(), expected)


def test_every_operation_it_has_keeps_its_specification_when_captured(toy):
    backend = toy(fallback="allow")
    specs, checked = all_specs(), 0
    for row in backend.table.rows:
        if row.origin == "absent" or not row.graph_safe:
            continue
        group, _, name = row.field.partition(".")
        function = getattr(getattr(backend.ops, group), name)
        faults = check_op(
            row.field,
            specs[row.field],
            function,
            runtime=backend.runtime,
            graph=backend.graph,
            dtypes=[torch.float32],
            train=False,
            level="quick",
        )
        assert faults == [], row.field
        checked += 1
    assert checked > 20


def test_what_it_lacks_decomposes_and_is_counted(toy, caplog):
    backend = toy()
    fallbacks = {row.field for row in backend.table.rows if row.fallback}
    assert fallbacks == {"norm.add_rms_norm", "rope.qk_norm_rotary", "rope.qk_norm_rotary_store", "rope.rotary_store"}
    x, weight = torch.randn(2, 8), torch.ones(8)
    with caplog.at_level(logging.WARNING, "polyrec.hardware"):
        for _ in range(3):
            backend.ops.norm.add_rms_norm(x, x, weight, 1e-6)
    assert backend.table.fallback_calls()["norm.add_rms_norm"] == 3
    assert [record.getMessage() for record in caplog.records if "op_fallback" in record.getMessage()] == [
        record.getMessage() for record in caplog.records
    ]
    assert len(caplog.records) == 1, "each is reported once"
    assert "norm.add_rms_norm" in caplog.text


def test_strict_refuses_every_fallback_in_one_message(toy):
    code, text = code_of(lambda: toy(fallback="strict"))
    assert code == "op_missing"
    for field in ("norm.add_rms_norm", "rope.qk_norm_rotary", "rope.qk_norm_rotary_store", "rope.rotary_store"):
        assert field in text


def test_allow_falls_back_in_silence_and_counts(toy, caplog):
    backend = toy(fallback="allow")
    with caplog.at_level(logging.WARNING, "polyrec.hardware"):
        backend.ops.norm.add_rms_norm(torch.ones(1, 8), torch.ones(1, 8), torch.ones(8), 1e-6)
    assert caplog.records == []
    assert backend.table.fallback_calls()["norm.add_rms_norm"] == 1


def test_fp8_is_refused_when_it_is_asked_for(toy):
    backend = toy(fallback="allow")
    for group, name in (("linear", "quantize_fp8"), ("norm", "rms_norm_fp8"), ("act", "silu_and_mul_fp8")):
        assert backend.table.row(f"{group}.{name}").origin == "absent"
        code, text = code_of(
            lambda group=group, name=name: getattr(getattr(backend.ops, group), name)(torch.ones(2, 8))
        )
        assert code == "op_not_available"
        assert f"{group}.{name}" in text


def test_all_that_is_missing_is_told_at_once(monkeypatch):
    monkeypatch.setattr(registry, "_PLATFORMS", Registry("platform", {"toy": "toy_platform:HollowToyBackend"}))
    code, text = code_of(lambda: build_hardware_backend(HardwareConfig(hardware_platform="toy")))
    assert code == "op_missing"
    for field in ("norm.rms_norm", "search.beam_step"):
        assert f"{field} (required)" in text
    assert "sampling" not in text, "optional operations are not missed at start"


def test_the_engine_recommends_there_what_it_recommends_on_the_cpu(toy, tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    histories = [["item-1", "item-2"], ["item-7"], ["item-3", "item-50", "item-9", "item-2"]]
    ours = Recommender.from_pretrained(folder, backend=toy(hardware_platform="toy", fallback="allow"))
    theirs = Recommender.from_pretrained(folder, backend=toy(hardware_platform="cpu"))
    for history in histories:
        found, expected = ours.recommend(history, n=10), theirs.recommend(history, n=10)
        assert [item.item_id for item in found.items] == [item.item_id for item in expected.items]
        for one, other in zip(found.items, expected.items, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-5)
