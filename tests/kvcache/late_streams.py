"""A device whose streams run late, and against each other in any order that their events allow: what lacks a wait reads or
overwrites too early. Torch operations are queued in the current stream, and run when something is waited for."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyrec.hardware.backends.cpu.runtime import CpuRuntime


@dataclass
class Mark:
    """One recording of an event."""

    passed: bool = False

    def pass_by(self) -> None:
        self.passed = True


@dataclass
class Step:
    """ready: whether the stream may go on; work: what it does then."""

    work: Callable[[], Any]
    ready: Callable[[], bool] = lambda: True


@dataclass(eq=False)
class LateStream:
    device: LateRuntime
    steps: deque[Step] = field(default_factory=deque)

    def synchronize(self) -> None:
        self.device.run(lambda: not self.steps)

    def wait_event(self, event: Any) -> None:
        mark = event.mark  # as it is recorded now
        if mark is not None:
            self.steps.append(Step(lambda: None, lambda: mark.passed))

    def wait_stream(self, stream: Any) -> None:
        event = LateEvent(self.device)
        event.record(stream)
        self.wait_event(event)


class LateEvent:
    def __init__(self, device: LateRuntime) -> None:
        self._device = device
        self.mark: Mark | None = None

    def record(self, stream: Any = None) -> None:
        mark = self.mark = Mark()
        (stream or self._device.current_stream()).steps.append(Step(mark.pass_by))

    def query(self) -> bool:
        return self.mark is None or self.mark.passed

    def synchronize(self) -> None:
        self._device.run(self.query)


class Queueing(TorchDispatchMode):
    """Views and new tensors are there at once; whatever reads or writes contents happens in its stream's time."""

    def __init__(self, device: LateRuntime) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        reads = any(isinstance(arg.type, torch.TensorType) or "Tensor" in str(arg.type) for arg in schema.arguments)
        if schema.is_mutable:
            self._queue(lambda: func(*args, **kwargs))
            return args[0]
        result = func(*args, **kwargs)
        if reads and not any(returned.alias_info for returned in schema.returns):
            self._queue(lambda: result.copy_(func(*args, **kwargs)))
            result.fill_(float("nan")) if result.is_floating_point() else result.fill_(-7)
        return result

    def _queue(self, work: Callable[[], Any]) -> None:
        self._device.current_stream().steps.append(Step(work))


class LateRuntime(CpuRuntime):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._default_stream = LateStream(self)
        self._all = [self._default_stream]
        self._at_work = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._at_work = True
        try:
            with Queueing(self):
                yield
        finally:
            self._at_work = False

    def stream(self) -> LateStream:
        self._all.append(LateStream(self))
        return self._all[-1]

    def event(self, *, timing: bool = False) -> LateEvent:
        return LateEvent(self)

    def synchronize(self) -> None:
        self.run(lambda: not any(stream.steps for stream in self._all))

    @torch.inference_mode()
    def run_beside(self) -> bool:
        """Takes all steps of the other streams that need not wait for the default one; whether those are all they have."""
        assert not self._at_work, "steps that are taken now would be queued again"
        others = self._all[1:]
        while ready := [stream for stream in others if stream.steps and stream.steps[0].ready()]:
            ready[0].steps.popleft().work()
        return not any(stream.steps for stream in others)

    @torch.inference_mode()
    def run(self, enough: Callable[[], bool]) -> None:
        """Takes steps of streams that need not wait, now of this one, now of that one, now mostly of one of them."""
        assert not self._at_work, "steps that are taken now would be queued again"
        eager, bias = self._random.choice(self._all), self._random.choice((0.0, 0.7, 1.0))
        while not enough():
            ready = [stream for stream in self._all if stream.steps and stream.steps[0].ready()]
            assert ready, "streams wait for each other"
            stream = eager if eager in ready and self._random.random() < bias else self._random.choice(ready)
            stream.steps.popleft().work()
