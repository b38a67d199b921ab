"""Triton kernels that a device starts while the one before still runs: programmatic dependent launch, CUDA from Hopper on.

What a launch costs then falls into the end of the kernel before; how much that is was not measured. Such a kernel calls
`begin_early` before all else: it waits there until everything before it is done and can be seen.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .backends.cuda_like.differences import build_of

ENABLED = False  # until a device has shown a gain


@triton.jit
def begin_early(EARLY: tl.constexpr):
    """First statement of a kernel that takes `EARLY`. Every program passes it, or kernels after it might start too early."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch on the device: `EARLY`, and what Triton needs where it is true."""
    if (
        not ENABLED
        or device.type != "cuda"
        or build_of(torch) != "cuda"
        or torch.cuda.get_device_capability(device)[0] < 9
    ):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
