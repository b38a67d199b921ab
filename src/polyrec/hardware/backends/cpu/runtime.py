"""The host as a device: work is done when the call returns, so streams and events have nothing to wait for."""

from __future__ import annotations

import math
import os
import platform
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from ....core.errors import HardwareError
from ...base.runtime import MemoryInfo, RngState, Runtime, check_rng_state
from ..machine import Machine


class HostEvent:
    """A moment on the host's clock."""

    def __init__(self, *, timing: bool = False) -> None:
        self._timing = timing
        self._at: float | None = None

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """What was recorded is done."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        assert self._timing and end_event._timing, "an event that is timed is made with timing=True"
        assert self._at is not None and end_event._at is not None, "an event is recorded before it is read"
        return (end_event._at - self._at) * 1e3


class HostStream:
    """Work is in order because the host does one thing after another."""

    def synchronize(self) -> None:
        """All work is done."""

    def wait_event(self, event: Any) -> None:
        """The event has passed."""

    def wait_stream(self, stream: Any) -> None:
        """The other stream's work is done."""


class CpuRuntime(Runtime):
    """Nothing is asynchronous here, and a copy to the device is the tensor itself."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._streams = threading.local()  # as on an accelerator, each thread has its own current stream
        self._default_stream = HostStream()

    def device_count(self) -> int:
        return 1

    def select(self, index: int) -> None:
        if index != 0:
            raise HardwareError(
                "device_index",
                f"Device cpu:{index} was asked for, and the host is one device: 0 ({self.device_name()}).",
                "Choose cpu, or another platform.",
            )

    def device_name(self) -> str:
        return cpu_name(Machine())

    def synchronize(self) -> None:
        """Host work is done when the call returns."""

    def stream(self) -> HostStream:
        return HostStream()

    def current_stream(self) -> HostStream:
        current: HostStream = getattr(self._streams, "current", self._default_stream)
        return current

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        self._streams.current = stream
        try:
            yield
        finally:
            self._streams.current = before

    def event(self, *, timing: bool = False) -> HostEvent:
        return HostEvent(timing=timing)

    def memory(self) -> MemoryInfo:
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryInfo(
            free=os.sysconf("SC_AVPHYS_PAGES") * page,
            total=os.sysconf("SC_PHYS_PAGES") * page,
            peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts KiB
        )

    def empty_cache(self) -> None:
        """The host's allocator gives back on its own."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The system maps pages of zeros and gives memory as they are written; torch's own zeros are all written."""
        size = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(max(size, 1), np.uint8))[:size].view(dtype).view(shape)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_host_async(self, tensor: torch.Tensor) -> tuple[torch.Tensor, HostEvent]:
        """A copy, as elsewhere: what is written into `tensor` afterwards does not reach it."""
        event = HostEvent()
        copy = tensor.clone()
        event.record()
        return copy, event

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> RngState:
        return {"host": torch.get_rng_state()}

    def set_rng_state(self, state: RngState) -> None:
        check_rng_state(state, {"host"})
        torch.set_rng_state(state["host"])

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    @property
    def collective_backend(self) -> str:
        return "gloo"

    def profiler_activities(self) -> list[Any]:
        return [torch.profiler.ProfilerActivity.CPU]

    def range(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()


def cpu_name(machine: Machine) -> str:
    """The processor's model and the number of cores that this process may use."""
    lines = machine.read("/proc/cpuinfo").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{models[0] if models else platform.processor() or platform.machine()}, {count} cores"
