"""Graphs on an NPU, whose captured tasks hold host numbers (sequence lengths) that a replay does not read again.

A task that takes such numbers is captured as a group of its own behind an external event, its gate. `update` opens the
group, launches the task anew with the numbers of this replay, and opens the gate; the graph waits at the gate and closes it
behind itself. An update that met a replay still under way would change lengths under it, so it waits for that one first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ....core.errors import HardwareError
from ...base.graph import CapturedGraph, Graph, States, capture_failed

WARM_UPS = 2  # kernels are chosen and workspaces allocated in the first calls
Numbers = Mapping[str, list[int]]
Launch = Callable[[Numbers], object]


@dataclass(frozen=True)
class Task:
    """A captured launch that holds host numbers. names: the states it reads; handle: what the library calls its group."""

    launch: Launch
    names: tuple[str, ...]
    handle: Any
    gate: Any


class Capture:
    """A capture under way, which collects the tasks that replays must refresh."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.tasks: list[Task] = []

    def task(self, launch: Launch, numbers: Numbers) -> None:
        """Captures `launch(numbers)`: only kernel launches, on buffers that live as long as the graph."""
        stream = self._library.npu.current_stream()
        gate = self._library.npu.ExternalEvent()
        gate.wait(stream)
        gate.reset(stream)
        self._library.npu.graph_task_group_begin(stream)
        launch(numbers)
        handle = self._library.npu.graph_task_group_end(stream)
        self.tasks.append(Task(launch, tuple(numbers), handle, gate))


# Attention is built without a graph (hardware.base.attention), so its kernels find the capture they run in here.
_under_way: ContextVar[Capture | None] = ContextVar("polyrec_ascend_capture", default=None)


def current_capture() -> Capture | None:
    """The capture that the calling thread is in, if any."""
    return _under_way.get()


class AscendCapturedGraph(CapturedGraph):
    """A captured function with its tasks; made by `AscendGraph.capture`."""

    def __init__(self, owner: AscendGraph, library: Any, captured: Any, result: Any, tasks: list[Task]) -> None:
        self._owner = owner
        self._library = library
        self._captured = captured
        self._result = result
        self._tasks = tasks
        self._passed: Any = None  # event behind the last replay
        self._open = False  # whether the gates are open for the next replay

    def replay(self) -> Any:
        assert self._captured is not None, "a closed graph is replayed"
        if self._tasks and not self._open:  # nothing was told: the same numbers as in the last replay
            self._refresh(None)
        self._captured.replay()
        if self._tasks:
            self._open = False
            self._passed = self._library.npu.Event()
            self._passed.record(self._library.npu.current_stream())
        return self._result

    def update(self, states: States) -> None:
        """states: int64 [n] by name; on the host, else each costs a wait for the device. Error: `graph_state_missing`."""
        names = {name for task in self._tasks for name in task.names}
        if missing := sorted(names - states.keys()):
            raise HardwareError(
                "graph_state_missing",
                f"Captured tasks read {', '.join(sorted(names))}, and {', '.join(missing)} was not given.",
                "Give every state that the captured function's attention was planned with.",
            )
        if names:
            self._refresh({name: states[name].tolist() for name in names})

    def close(self) -> None:
        if self._captured is None:
            return
        if self._passed is not None:
            self._passed.synchronize()
        self._captured.reset()
        self._captured, self._result, self._tasks = None, None, []
        self._owner.num_live -= 1

    def _refresh(self, numbers: Numbers | None) -> None:
        """Launches every task with new numbers (None: leaves them) and opens its gate."""
        if self._passed is not None:
            self._passed.synchronize()
        stream = self._owner.update_stream()
        with self._library.npu.stream(stream):
            for task in self._tasks:
                if numbers is not None:
                    self._library.npu.graph_task_update_begin(stream, task.handle)
                    task.launch(numbers)
                    self._library.npu.graph_task_update_end(stream)
                task.gate.record(stream)
        self._open = True


class AscendGraph(Graph):
    """NPUGraph. max_graphs: how many may live at a time; None: until the device has no streams left for another."""

    def __init__(self, library: Any, max_graphs: int | None = None) -> None:
        self._library = library
        self._max_graphs = max_graphs
        self._update_stream: Any = None
        self.num_live = 0

    def new_pool(self) -> object:
        return self._library.npu.graph_pool_handle()

    def capture(self, function: Callable[[], Any], pool: object | None = None) -> CapturedGraph:
        if self.budget() == 0:
            raise HardwareError(
                "graph_budget_exhausted",
                f"All {self._max_graphs} graphs of this device are in use.",
                "Close one, or capture fewer sizes.",
            )
        capture = Capture(self._library)
        captured = self._library.npu.NPUGraph()
        try:
            self._warm_up(function)
            with _capturing(capture), self._library.npu.graph(captured, pool=pool):
                result = function()
        except Exception as error:  # the vendor's errors are RuntimeErrors; the function's own may be any
            raise capture_failed(function, error, "Where the device is out of streams, capture fewer sizes.") from error
        self.num_live += 1
        return AscendCapturedGraph(self, self._library, captured, result, capture.tasks)

    def budget(self) -> int | None:
        return None if self._max_graphs is None else self._max_graphs - self.num_live

    def update_stream(self) -> Any:
        """The stream on which tasks are refreshed; made when first needed, so that building a backend opens no device."""
        if self._update_stream is None:
            self._update_stream = self._library.npu.Stream()
        return self._update_stream

    def _warm_up(self, function: Callable[[], Any]) -> None:
        """A few calls on a side stream, finished before the capture begins."""
        before, side = self._library.npu.current_stream(), self._library.npu.Stream()
        side.wait_stream(before)
        with self._library.npu.stream(side):
            for _ in range(WARM_UPS):
                function()
        before.wait_stream(side)
        self._library.npu.synchronize()


@contextmanager
def _capturing(capture: Capture) -> Iterator[None]:
    token = _under_way.set(capture)
    try:
        yield
    finally:
        _under_way.reset(token)
