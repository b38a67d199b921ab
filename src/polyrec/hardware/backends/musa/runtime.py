"""The runtime over `torch.musa`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from ..cuda_like.runtime import CudaLikeRuntime
from ..machine import Machine

VISIBLE_DEVICES = "MUSA_VISIBLE_DEVICES"


def load_musa(machine: Machine) -> Any:
    """`torch.musa`, which importing torch_musa adds to torch; the package itself where it has not."""
    package: ModuleType = machine.load("torch_musa")
    return getattr(torch, "musa", package)


class MusaRuntime(CudaLikeRuntime):
    """As on CUDA; collectives go through MCCL, and there are no profiler ranges.

    torch_musa adds `ProfilerActivity.MUSA` to torch.
    """

    def __init__(self, module: Any = None, device_type: str = "musa") -> None:
        super().__init__(
            load_musa(Machine()) if module is None else module,
            device_type,
            collectives="mccl",
            activity="MUSA",
            visible_devices=VISIBLE_DEVICES,
        )

    def range(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()
