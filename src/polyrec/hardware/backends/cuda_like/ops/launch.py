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
    """Whether the kernel alone runs: where no gradient is asked for. It reaches no host memory."""
    return not asks_gradient(x, *others) and on_accelerator(x)


def trains_kernel(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernel runs with its backward kernel. A compiler gets the reference, which it can look into, and fp64 too:
    kernels compute in fp32."""
    traced = torch.compiler.is_compiling()
    return not traced and asks_gradient(x, *others) and on_accelerator(x) and x.dtype != torch.float64


def asks_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def as_rows(x: Tensor) -> Tensor:
    """x [..., D] as [N, D] with each row's values in one piece, copied only where it must be."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
