"""What a platform's runtime offers to the layers above: devices, streams, events, memory, copies, seeds. No layer above calls
a device module itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...core.errors import HardwareError

RngState = Mapping[str, torch.Tensor]  # "host" and, on an accelerator, "device": uint8


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of one device: free now, in all, and the peak this process has used."""

    free: int
    total: int
    peak: int


class Event(Protocol):
    """A point in a stream's work. Made by `Runtime.event`."""

    def record(self, stream: Any = None) -> None:
        """Marks the end of what the stream (default: the current one) has been given so far."""
        ...

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Waits on the host until the device has passed it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`; both made with timing=True."""
        ...


class Stream(Protocol):
    """An ordered queue of device work. Made by `Runtime.stream`."""

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


class Runtime(ABC):
    """One device of one platform. device: where tensors of this process live."""

    device: torch.device

    @abstractmethod
    def device_count(self) -> int:
        """How many devices of the platform this process sees."""

    @abstractmethod
    def select(self, index: int) -> None:
        """Makes device `index` this process's device, before anything is allocated; out of range is `device_index`."""

    def enter_thread(self) -> None:  # noqa: B027 (a host has one device)
        """Makes it the calling thread's too: where each thread has a current device, a new one begins with the first."""

    @abstractmethod
    def device_name(self) -> str:
        """The vendor's name of the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the device has done all work queued so far."""

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that work goes to now."""

    @abstractmethod
    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """Work inside goes to `stream`."""

    @abstractmethod
    def event(self, *, timing: bool = False) -> Event:
        """A new event; timing: `elapsed_time` will be asked."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Memory numbers of the device."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Gives memory that the allocator holds and nothing uses back to the device."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the device, for much memory of which little may be used: a system that can gives it as it is written."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @abstractmethod
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The host tensor in memory that the device can copy from asynchronously; itself where there is no such memory."""

    @abstractmethod
    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device, copied asynchronously through pinned memory where the platform has it."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device tensor on the host, complete when this returns."""

    @abstractmethod
    def to_host_async(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """A pinned host tensor that is complete once the event is passed."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seeds every generator of the host and the device."""

    @abstractmethod
    def rng_state(self) -> RngState:
        """States of the default generators of host and device."""

    @abstractmethod
    def set_rng_state(self, state: RngState) -> None:
        """Restores what `rng_state` returned."""

    @abstractmethod
    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        """Mixed precision in `dtype`; None keeps every tensor's own."""

    @property
    @abstractmethod
    def collective_backend(self) -> str:
        """Name of the torch.distributed backend for this device."""

    @abstractmethod
    def profiler_activities(self) -> list[Any]:
        """`torch.profiler.ProfilerActivity` values that show the host's and the device's work."""

    @abstractmethod
    def range(self, name: str) -> AbstractContextManager[Any]:
        """A named range in the vendor's profiler; free when none is attached."""


def check_rng_state(state: RngState, expected: set[str]) -> None:
    """Refuses the generators of another kind of platform, which would not repeat the run: `rng_state_of_another_platform`."""
    if set(state) != expected:
        raise HardwareError(
            "rng_state_of_another_platform",
            f"The saved state is of the generators {sorted(state)}, and this platform has {sorted(expected)}.",
            "Go on on the kind of platform that saved it, or begin a new run.",
        )
