"""The host as a device."""

from __future__ import annotations

import os
import resource
from contextlib import AbstractContextManager, nullcontext

import torch

from ...base.runtime import MemoryInfo, Runtime


class CpuRuntime(Runtime):
    """Nothing is asynchronous here, and a copy to the device is the tensor itself."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def synchronize(self) -> None:
        """Host work is done when the call returns."""

    def memory(self) -> MemoryInfo:
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryInfo(
            free=os.sysconf("SC_AVPHYS_PAGES") * page,
            total=os.sysconf("SC_PHYS_PAGES") * page,
            peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts KiB
        )

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    @property
    def collective_backend(self) -> str:
        return "gloo"
