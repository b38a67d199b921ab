"""The runtime over `torch.xpu`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..cuda_like.runtime import CudaLikeRuntime, ProfilerRange

VISIBLE_DEVICES = "ZE_AFFINITY_MASK"  # Level Zero's list of the devices that a process sees


class XpuRuntime(CudaLikeRuntime):
    """As on CUDA; collectives go through XCCL, and profiler ranges are Intel's ITT, which VTune shows."""

    def __init__(self, module: Any = None, device_type: str = "xpu", marks: Any = None) -> None:
        """marks: what pushes and pops profiler ranges; None: torch's ITT."""
        super().__init__(
            torch.xpu if module is None else module,
            device_type,
            collectives="xccl",
            activity="XPU",
            visible_devices=VISIBLE_DEVICES,
        )
        self._marks = torch.profiler.itt if marks is None else marks

    def range(self, name: str) -> AbstractContextManager[Any]:
        return ProfilerRange(self._marks, name) if self._marks.is_available() else nullcontext()
