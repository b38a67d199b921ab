"""When an operation runs its Triton kernel, and how the kernels are reached without a Triton to import these modules."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor


@functools.cache
def kernels(name: str) -> Any:
    """The module `name` beside this package's, imported at an operation's first call: Triton may not be installed."""
    return importlib.import_module(f"{__package__.rpartition('.')[0]}.kernels.{name}")


def on_accelerator(x: Tensor) -> bool:
    """Whether a kernel can read x."""
    return x.is_cuda


def runs_kernel(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernel runs; else the reference does: kernels have no backward pass and reach no host memory."""
    if torch.is_grad_enabled() and (x.requires_grad or any(other.requires_grad for other in others)):
        return False
    return on_accelerator(x)
