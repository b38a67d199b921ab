"""For test bodies that run in Triton's interpreter or on a device: the platform whose tensors they take, and what stands in for
a part of the interpreter that is wrong."""

from __future__ import annotations

import os

import numpy as np
import torch

from polyrec.hardware.backends.cpu import CpuBackend
from polyrec.hardware.backends.cuda_like import NvidiaBackend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

BY_TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
}


def backend_of_bodies():
    """The host's, where Triton interprets; else the first device's."""
    if INTERPRETED:
        return CpuBackend()
    built = NvidiaBackend()
    built.runtime.select(0)
    return built


def converted(values, source, target, rounding):
    """For the interpreter's conversion, which loses a carry into the exponent (1.97 becomes 1 in e4m3)."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).view(BY_TORCH[str(source)]).to(BY_TORCH[str(target)])
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[tensor.element_size()]
    return tensor.view(bits).numpy()
