"""`torch_npu.npu` of the stand-in: streams and events that note their order, and graphs whose host numbers are frozen.

A graph is a tape. During a capture every torch operation and every kernel of the stand-in is recorded with its tensors; a
replay runs the tape on the same storages. A task group is a part of the tape that only an update changes: the same kernels
on the same tensors with other host numbers. A gate (ExternalEvent) that a replay meets closed would never open: an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

NOT_CAPTURABLE = (
    "item.",
    "_local_scalar_dense",
    "nonzero",
    "repeat_interleave.Tensor",
    "masked_select",
    "bincount",
    "equal",
)
Step = Callable[[], None]


class Stream:
    def __init__(self, name: str, log: list[tuple[str, dict[str, Any]]]) -> None:
        self.name = name
        self._log = log

    def wait_stream(self, stream: Stream) -> None:
        self._log.append(("Stream.wait_stream", {"self": self.name, "stream": stream.name}))

    def wait_event(self, event: Any) -> None:
        self._log.append(("Stream.wait_event", {"self": self.name}))

    def synchronize(self) -> None:
        self._log.append(("Stream.synchronize", {"self": self.name}))


class Tape(TorchDispatchMode):
    """What a graph repeats. quiet: inside a kernel of the stand-in, which is one step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.quiet:
            return func(*args, **(kwargs or {}))
        if str(func).removeprefix("aten.").startswith(NOT_CAPTURABLE):
            raise RuntimeError(f"stand-in: {func} needs values on the host")
        return self.record(lambda: func(*args, **(kwargs or {})), (args, kwargs))

    def record(self, call: Callable[[], Any], arguments: Any) -> Any:
        """Runs a call, and again in each replay, into the same results; those that are views of arguments need no copy."""
        result = call()
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}
        places = [place for place, t in enumerate(_tensors(result)) if t.untyped_storage().data_ptr() not in known]
        kept = _tensors(result)

        def again() -> None:
            found = _tensors(call())
            for place in places:
                kept[place].copy_(found[place])

        self.steps.append(again)
        return result


class TaskGroup:
    """Kernels between graph_task_group_begin and _end: name, tensors, and how to run them with the frozen numbers."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, list[int], Step]] = []

    def __call__(self) -> None:
        for _, _, run in self.kernels:
            run()


class NoWork(TorchDispatchMode):
    """While a task is updated, nothing but its kernels may be called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"stand-in: {func} within a task update")


class Npu:
    """log: the library's list of calls, in which graph calls appear too."""

    def __init__(self, log: list[tuple[str, dict[str, Any]]], num_devices: int) -> None:
        self.log = log
        self.num_devices = num_devices
        self.device = 0
        self.available = True
        self.tape: Tape | None = None
        self._group: TaskGroup | None = None
        self._update: tuple[TaskGroup, NoWork, list[tuple[str, list[int], Step]]] | None = None
        self._streams = 1
        self._current = Stream("default", log)
        self._generator = torch.Generator().manual_seed(0)
        self.mstx = SimpleNamespace(range_start=self._range_start, range_end=self._range_end)
        npu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.timing = enable_timing
                self.time: float | None = None

            def record(self, stream: Stream | None = None) -> None:
                npu.note("Event.record", stream=(stream or npu._current).name)
                self.time = time.perf_counter()

            def query(self) -> bool:
                return self.time is not None

            def elapsed_time(self, end_event: Event) -> float:
                assert all(event.timing for event in (self, end_event)), "stand-in: made without timing"
                begin, end = (event.time for event in (self, end_event))
                assert begin is not None, "stand-in: not recorded"
                assert end is not None, "stand-in: not recorded"
                return 1000 * (end - begin)

            def synchronize(self) -> None:
                npu.note("Event.synchronize")

        class ExternalEvent:
            """A flag: the graph waits for it and lowers it, `record` raises it."""

            def __init__(self) -> None:
                self.is_open = False

            def wait(self, stream: Stream) -> None:
                def step() -> None:
                    if not self.is_open:
                        raise RuntimeError("stand-in: the graph waits for ever, for its gate was not opened")

                npu.in_capture(stream).steps.append(step)

            def reset(self, stream: Stream) -> None:
                npu.in_capture(stream).steps.append(lambda: setattr(self, "is_open", False))

            def record(self, stream: Stream) -> None:
                npu.note("ExternalEvent.record", stream=stream.name)
                self.is_open = True

        class NPUGraph:
            def __init__(self) -> None:
                self.steps: list[Step] | None = None

            def replay(self) -> None:
                assert self.steps is not None, "stand-in: nothing was captured, or it was reset"
                npu.note("NPUGraph.replay")
                with torch.inference_mode():
                    for step in self.steps:
                        step()

            def reset(self) -> None:
                npu.note("NPUGraph.reset")
                self.steps = None

        self.Event, self.ExternalEvent, self.NPUGraph = Event, ExternalEvent, NPUGraph

    def note(self, name: str, **facts: Any) -> None:
        self.log.append((name, facts))

    # Devices

    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        return self.num_devices

    def set_device(self, device: int) -> None:
        self.note("set_device", device=device)
        self.device = device

    def get_device_name(self, device_name: int | None = None) -> str:
        return f"Ascend910B{self.device if device_name is None else device_name}"

    def synchronize(self, device: int | None = None) -> None:
        assert self.tape is None, "stand-in: a capture may not wait for the device"
        self.note("synchronize")

    def mem_get_info(self, device: int | None = None) -> tuple[int, int]:
        return 60 * 2**30 - (device or 0), 64 * 2**30

    def max_memory_allocated(self, device: int | None = None) -> int:
        return 3 * 2**30 + (device or 0)

    def empty_cache(self) -> None:
        self.note("empty_cache")

    def manual_seed_all(self, seed: int) -> None:
        self.note("manual_seed_all", seed=seed)
        self._generator.manual_seed(seed)

    def get_rng_state(self, device: Any = "npu") -> Tensor:
        return self._generator.get_state()

    def set_rng_state(self, new_state: Tensor, device: Any = "npu") -> None:
        self._generator.set_state(new_state)

    def draw(self) -> float:
        """A number of the device's generator, for tests."""
        return float(torch.rand((), generator=self._generator))

    # Streams

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        assert self.tape is None, "stand-in: a capture may not make streams"
        self._streams += 1
        return Stream(f"stream {self._streams - 1}", self.log)

    def current_stream(self, device: Any = None) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def _range_start(self, message: str, stream: Any = None, domain: str = "default") -> int:
        self.note("range_start", message=message)
        return len(self.log)

    def _range_end(self, range_id: int, domain: str = "default") -> None:
        self.note("range_end", range_id=range_id)

    # Graphs

    def graph_pool_handle(self) -> object:
        return ("pool", len(self.log))

    @contextmanager
    def graph(self, npu_graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
        self.synchronize()
        self.note("graph", pool=pool)
        side = stream or self.Stream()
        self.tape = Tape()
        try:
            with self.stream(side), torch.inference_mode(), self.tape:
                yield
            assert self._group is None, "stand-in: a task group was not ended"
            npu_graph.steps = self.tape.steps
        finally:
            self.tape = self._group = None

    def in_capture(self, stream: Stream) -> Tape:
        assert self.tape is not None, "stand-in: outside a capture"
        assert stream is self._current, "stand-in: not the stream that is captured"
        return self.tape

    def graph_task_group_begin(self, stream: Stream) -> None:
        tape = self.in_capture(stream)
        self._group = TaskGroup()
        tape.steps.append(self._group)

    def graph_task_group_end(self, stream: Stream) -> TaskGroup:
        self.in_capture(stream)
        group, self._group = self._group, None
        assert group is not None, "stand-in: no task group was begun"
        return group

    def graph_task_update_begin(self, stream: Stream, handle: TaskGroup) -> None:
        assert stream is self._current, "stand-in: not the current stream"
        self.note("graph_task_update_begin", stream=stream.name)
        self._update = handle, NoWork(), []
        self._update[1].__enter__()

    def graph_task_update_end(self, stream: Stream) -> None:
        assert self._update is not None, "stand-in: no update was begun"
        (handle, guard, kernels), self._update = self._update, None
        guard.__exit__(None, None, None)
        assert [k[:2] for k in kernels] == [k[:2] for k in handle.kernels], "stand-in: other kernels than were captured"
        handle.kernels = kernels

    def launch(self, name: str, kernel: Callable[..., Any], first: list[Any], rest: dict[str, Any]) -> Any:
        """Runs a kernel of the stand-in, or notes it for the tape, the open task group, or the task that is updated."""
        frozen = {key: list(value) if isinstance(value, list) else value for key, value in rest.items()}

        def call() -> Any:
            return kernel(*first, **frozen)

        if self._update is not None:
            assert name.endswith(".out"), "stand-in: a task update writes into the buffers of the capture"
            self._update[2].append((name, [t.data_ptr() for t in _tensors((first, rest))], call))
            return rest["out"]
        if self.tape is None:
            return call()
        self.tape.quiet = True
        try:
            if self._group is not None:
                self._group.kernels.append((name, [t.data_ptr() for t in _tensors((first, rest))], call))
                return call()
            return self.tape.record(call, (first, rest))
        finally:
            self.tape.quiet = False


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
