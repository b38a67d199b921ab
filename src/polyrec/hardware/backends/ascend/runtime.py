"""An Ascend NPU as a device: streams, events, memory, copies and seeds through `torch_npu.npu`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ....core.errors import HardwareError
from ...base.runtime import Event, MemoryInfo, RngState, Runtime, Stream, check_rng_state


class AscendRuntime(Runtime):
    """One NPU. Nothing is initialised on a device before `select` or the first use.

    library: torch_npu. device_type: what torch calls the devices, which torch_npu makes `npu`.
    """

    def __init__(self, library: Any, device_type: str = "npu") -> None:
        self._library = library
        self._index = 0
        self._device_type = device_type
        self.device = torch.device(device_type, 0)

    def device_count(self) -> int:
        return self._library.npu.device_count()

    def select(self, index: int) -> None:
        count = self.device_count()
        if not 0 <= index < count:
            raise HardwareError(
                "device_index",
                f"There is no NPU {index}: this process sees {count}"
                + (f", numbered 0…{count - 1}." if count else "."),
                "Name one of them, or change ASCEND_RT_VISIBLE_DEVICES.",
            )
        self._library.npu.set_device(index)
        self._index = index
        self.device = torch.device(self._device_type, index)

    def enter_thread(self) -> None:
        self._library.npu.set_device(self._index)

    def device_name(self) -> str:
        return self._library.npu.get_device_name(self._index)

    def synchronize(self) -> None:
        self._library.npu.synchronize()

    def stream(self) -> Stream:
        return self._library.npu.Stream()

    def current_stream(self) -> Stream:
        return self._library.npu.current_stream()

    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        return self._library.npu.stream(stream)

    def event(self, *, timing: bool = False) -> Event:
        return self._library.npu.Event(enable_timing=timing)

    def memory(self) -> MemoryInfo:
        free, total = self._library.npu.mem_get_info(self._index)
        return MemoryInfo(free=free, total=total, peak=self._library.npu.max_memory_allocated(self._index))

    def empty_cache(self) -> None:
        self._library.npu.empty_cache()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # The allocator of pinned memory keeps the pages until the copy has passed, so the pinned tensor may be dropped.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def to_host_async(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        there = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory()
        there.copy_(tensor, non_blocking=True)
        copied = self.event()
        copied.record(self.current_stream())
        return there, copied

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._library.npu.manual_seed_all(seed)

    def rng_state(self) -> RngState:
        return {"host": torch.get_rng_state(), "device": self._library.npu.get_rng_state(self.device)}

    def set_rng_state(self, state: RngState) -> None:
        check_rng_state(state, {"host", "device"})
        torch.set_rng_state(state["host"])
        self._library.npu.set_rng_state(state["device"], self.device)

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        return nullcontext() if dtype is None else torch.autocast(self._device_type, dtype=dtype)

    @property
    def collective_backend(self) -> str:
        return "hccl"

    def profiler_activities(self) -> list[Any]:
        """Members of torch_npu's own ProfilerActivity: `torch_npu.profiler.profile` is what records this device."""
        return [self._library.profiler.ProfilerActivity.CPU, self._library.profiler.ProfilerActivity.NPU]

    def range(self, name: str) -> AbstractContextManager[Any]:
        return self._marked(name)

    @contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        number = self._library.npu.mstx.range_start(name)
        try:
            yield
        finally:
            self._library.npu.mstx.range_end(number)
