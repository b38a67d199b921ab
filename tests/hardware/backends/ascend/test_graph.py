"""Graphs whose tasks hold host numbers: frozen at capture, refreshed by `update`, never under a replay that still runs."""

from __future__ import annotations

import pytest
import torch

from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.ascend.graph import AscendGraph, current_capture
from polyrec.hardware.base.graph import CapturedGraph, Graph

from .standin import Library


@pytest.fixture
def library():
    return Library()


class Sums:
    """The sum of each row's first `length` values: a kernel that takes lengths from the host, as attention does."""

    def __init__(self, library, lengths):
        self.library = library
        self.rows = torch.arange(12.0).view(3, 4)
        self.lengths = lengths
        self.result = torch.zeros(3)
        self.calls = 0

    def run(self):
        self.calls += 1
        numbers = {"lengths": self.lengths}
        capture = current_capture()
        if capture is None:
            self.launch(numbers)
        else:
            capture.task(self.launch, numbers)
        return self.result * 10

    def launch(self, numbers):
        self.library.npu.launch("sums.out", self.kernel, [self.rows], {"out": self.result, **numbers})

    @staticmethod
    def kernel(rows, *, lengths, out):
        for row, length in enumerate(lengths):
            out[row] = rows[row, :length].sum()

    def expected(self, lengths):
        return [10 * float(row[:length].sum()) for row, length in zip(self.rows, lengths, strict=True)]


@pytest.fixture
def sums(library):
    return Sums(library, [1, 2, 3])


@pytest.fixture
def captured(library, sums):
    return AscendGraph(library).capture(sums.run)


def test_parts_are_of_the_contract(library, captured):
    assert isinstance(AscendGraph(library), Graph)
    assert isinstance(captured, CapturedGraph)


def test_a_replay_reads_buffers_anew_and_runs_no_python(sums, captured):
    calls = sums.calls
    sums.rows.mul_(2)
    assert captured.replay().tolist() == sums.expected([1, 2, 3])
    assert sums.calls == calls


def test_lengths_are_frozen_until_they_are_updated(sums, captured):
    sums.lengths[:] = [4, 4, 4]  # the caller's own list is not what the graph holds
    assert captured.replay().tolist() == sums.expected([1, 2, 3])
    captured.update({"lengths": torch.tensor([3, 1, 4])})
    assert captured.replay().tolist() == sums.expected([3, 1, 4])
    assert captured.replay().tolist() == sums.expected([3, 1, 4])  # and stay, without another update
    captured.update({"lengths": torch.tensor([1, 1, 1])})
    captured.update({"lengths": torch.tensor([2, 2, 2])})  # the last one counts
    assert captured.replay().tolist() == sums.expected([2, 2, 2])


def test_two_graphs_keep_their_own_lengths(library):
    graph = AscendGraph(library)
    both = [Sums(library, [1, 1, 1]), Sums(library, [2, 2, 2])]
    first, second = (graph.capture(sums.run) for sums in both)
    first.update({"lengths": torch.tensor([4, 4, 4])})
    assert second.replay().tolist() == both[1].expected([2, 2, 2])
    assert first.replay().tolist() == both[0].expected([4, 4, 4])


def test_a_task_is_captured_as_a_group_behind_its_gate(library, sums):
    """Without the gate the graph would not wait for the update; the stand-in's gates raise when met closed."""
    library.calls.clear()
    captured = AscendGraph(library).capture(sums.run)
    bare = captured._captured  # the graph without the care taken around it
    with pytest.raises(RuntimeError, match="waits for ever"):
        bare.replay()
    captured.update({"lengths": torch.tensor([1, 1, 1])})
    bare.replay()
    with pytest.raises(RuntimeError, match="waits for ever"):
        bare.replay()


def test_an_update_waits_for_the_replay_before_it(library, sums, captured):
    captured.update({"lengths": torch.tensor([1, 1, 1])})
    captured.replay()
    library.calls.clear()
    captured.update({"lengths": torch.tensor([2, 2, 2])})
    assert library.names()[:2] == ["Event.synchronize", "graph_task_update_begin"]
    library.calls.clear()
    captured.replay()
    assert library.names() == ["NPUGraph.replay", "Event.record"]


def test_a_replay_without_an_update_opens_the_gates_alone(library, captured):
    captured.replay()
    library.calls.clear()
    captured.replay()
    assert library.names() == ["Event.synchronize", "ExternalEvent.record", "NPUGraph.replay", "Event.record"]


def test_updates_go_through_a_stream_of_their_own(library, captured):
    library.calls.clear()
    captured.update({"lengths": torch.tensor([1, 1, 1])})
    streams = {facts["stream"] for name, facts in library.calls if "stream" in facts}
    assert len(streams) == 1
    assert streams.isdisjoint({"default"})


def test_a_graph_without_tasks_needs_no_update(library):
    buffer = torch.tensor([1.0, 2.0])
    captured = AscendGraph(library).capture(lambda: buffer * 3)
    captured.update({"lengths": torch.tensor([1])})
    library.calls.clear()
    buffer.fill_(5)
    assert captured.replay().tolist() == [15, 15]
    assert library.names() == ["NPUGraph.replay"]


def test_a_missing_state_is_named(captured):
    with pytest.raises(HardwareError, match="lengths") as caught:
        captured.update({"length": torch.tensor([1, 1, 1])})
    assert caught.value.code == "graph_state_missing"


def test_functions_are_warmed_up_on_a_side_stream(library, sums):
    library.calls.clear()
    AscendGraph(library).capture(sums.run)
    assert sums.calls == 3
    waits = [facts for name, facts in library.calls if name == "Stream.wait_stream"]
    assert [(wait["self"] == "default", wait["stream"] == "default") for wait in waits] == [
        (False, True),
        (True, False),
    ]
    assert library.names().index("synchronize") < library.names().index("graph")


def test_pools_are_handed_on(library):
    graph = AscendGraph(library)
    pool = graph.new_pool()
    library.calls.clear()
    graph.capture(lambda: torch.zeros(1), pool)
    assert ("graph", {"pool": pool}) in library.calls


def test_the_budget_is_kept_and_given_back(library):
    graph = AscendGraph(library, max_graphs=2)
    first, second = (graph.capture(lambda: torch.zeros(1)) for _ in range(2))
    assert graph.budget() == 0
    with pytest.raises(HardwareError, match="2 graphs") as caught:
        graph.capture(lambda: torch.zeros(1))
    assert caught.value.code == "graph_budget_exhausted"
    second.close()
    second.close()
    assert graph.budget() == 1
    graph.capture(lambda: torch.zeros(1))
    first.replay()
    assert AscendGraph(library).budget() is None


def test_closing_waits_and_frees(library, captured):
    captured.replay()
    library.calls.clear()
    captured.close()
    assert library.names() == ["Event.synchronize", "NPUGraph.reset"]
    with pytest.raises(AssertionError, match="closed"):
        captured.replay()


def test_a_failed_capture_names_the_function_and_leaves_the_process_usable(library, sums):
    def branches():
        return 1 if sums.rows.sum().item() > 0 else 2

    graph = AscendGraph(library, max_graphs=1)
    with pytest.raises(HardwareError, match="branches") as caught:
        graph.capture(branches)
    assert caught.value.code == "graph_capture_failed"
    assert "needs values on the host" in str(caught.value.__cause__)
    assert current_capture() is None
    assert graph.budget() == 1
    assert graph.capture(sums.run).replay().tolist() == sums.expected([1, 2, 3])


def test_building_a_graph_opens_no_device(library):
    AscendGraph(library)
    assert library.calls == []
    assert library.npu._streams == 1
