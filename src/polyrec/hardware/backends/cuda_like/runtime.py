"""The runtime over a torch device module that offers what `torch.cuda` offers. It initialises no device before use."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ....core.errors import HardwareError
from ...base.runtime import Event, MemoryInfo, RngState, Runtime, Stream, check_rng_state


class ProfilerRange:
    """A named range of the vendor's profiler. The name is passed as it is (torch's own context manager formats it)."""

    def __init__(self, marks: Any, name: str) -> None:
        self._marks = marks
        self._name = name

    def __enter__(self) -> None:
        self._marks.range_push(self._name)

    def __exit__(self, *_: object) -> None:
        self._marks.range_pop()


class CudaLikeRuntime(Runtime):
    """One device of a module such as `torch.cuda`; `select` says which, 0 until then.

    module: its streams, events, memory and generators; None is torch.cuda. device_type: what torch calls the devices.
    collectives: its torch.distributed backend. activity: its `ProfilerActivity`. visible_devices: the variable
    that hides devices.
    """

    def __init__(
        self,
        module: Any = None,
        device_type: str = "cuda",
        *,
        collectives: str = "nccl",
        activity: str = "CUDA",
        visible_devices: str = "CUDA_VISIBLE_DEVICES",
    ) -> None:
        self.module = torch.cuda if module is None else module
        self.device_type = device_type
        self.device = torch.device(device_type, 0)
        self._collectives = collectives
        self._activity = activity
        self._visible_devices = visible_devices

    def device_count(self) -> int:
        return int(self.module.device_count())

    def select(self, index: int) -> None:
        count = self.device_count()
        if not 0 <= index < count:
            names = ", ".join(f"{place} ({self.module.get_device_name(place)})" for place in range(count))
            raise HardwareError(
                "device_index",
                f"Device {self.device_type}:{index} was asked for, and this process sees {names or 'none'}.",
                f"Choose one of these; {self._visible_devices} says which devices a process sees.",
            )
        self.module.set_device(index)
        self.device = torch.device(self.device_type, index)

    def enter_thread(self) -> None:
        self.module.set_device(self.device.index)

    def device_name(self) -> str:
        return str(self.module.get_device_name(self.device))

    def synchronize(self) -> None:
        self.module.synchronize(self.device)

    def stream(self) -> Stream:
        stream: Stream = self.module.Stream(device=self.device)
        return stream

    def current_stream(self) -> Stream:
        stream: Stream = self.module.current_stream(self.device)
        return stream

    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def event(self, *, timing: bool = False) -> Event:
        event: Event = self.module.Event(enable_timing=timing)
        return event

    def memory(self) -> MemoryInfo:
        """free and total: of the device, whoever uses it. peak: bytes in this process's tensors, not in reserve."""
        free, total = self.module.mem_get_info(self.device)
        return MemoryInfo(free=free, total=total, peak=self.module.max_memory_allocated(self.device))

    def empty_cache(self) -> None:
        self.module.empty_cache()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        # An expanded tensor has fewer elements than its shape says, and cannot be pinned as it is.
        return tensor if tensor.is_pinned() else tensor.contiguous().pin_memory()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The pinned copy is safe to drop: torch keeps its memory until the stream has passed the copy."""
        return self.pin(tensor).to(self.device, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def to_host_async(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        host = self._pinned(tensor.shape, tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        event = self.event()
        event.record(self.current_stream())
        return host, event

    def seed(self, seed: int) -> None:
        """Before the device is initialised, its seed waits until it is."""
        torch.manual_seed(seed)
        self.module.manual_seed_all(seed)

    def rng_state(self) -> RngState:
        return {"host": torch.get_rng_state(), "device": self.module.get_rng_state(self.device)}

    def set_rng_state(self, state: RngState) -> None:
        check_rng_state(state, {"host", "device"})
        torch.set_rng_state(state["host"])
        self.module.set_rng_state(state["device"], self.device)

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        return nullcontext() if dtype is None else torch.autocast(self.device_type, dtype=dtype)

    @property
    def collective_backend(self) -> str:
        return self._collectives

    def profiler_activities(self) -> list[Any]:
        """torch's extensions outside its tree profile as PrivateUse1 where they add no activity of their own."""
        kinds = torch.profiler.ProfilerActivity
        return [kinds.CPU, getattr(kinds, self._activity, None) or kinds.PrivateUse1]

    def range(self, name: str) -> AbstractContextManager[Any]:
        return ProfilerRange(self.module.nvtx, name)

    def _pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory that the device can write asynchronously."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)
