"""fp32 matrix products through oneDNN where torch's own choice, MKL, leaves the CPU's widest instructions unused.

On AMD CPUs with AVX-512, MKL runs its AVX2 code: 110 GFLOP/s a core on an EPYC of 2025 for 1,600 x 128 by 512 x 128, where
oneDNN reaches 245. torch offers oneDNN's fp32 product only as `torch.ops.mkldnn._linear_pointwise`, the op that its compiler
emits; it has no gradient, so one is given here. Everywhere else the reference (torch's choice) is already the fast one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....ops.linear import REFERENCE_LINEAR_OPS, LinearOps
from ....ops.linear import mm as reference_mm

# Below this many multiplications oneDNN's longer call (13 µs for one row against 5) costs more than its kernel saves.
MIN_MULTIPLICATIONS = 1_000_000


def cpu_linear_ops() -> LinearOps:
    """The products for this machine; the same machine always gets the same, so that runs repeat bit for bit."""
    return LinearOps(mm=onednn_mm) if has_onednn_mm() and mkl_is_narrow() else REFERENCE_LINEAR_OPS


def has_onednn_mm() -> bool:
    """Whether this torch has the op."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def mkl_is_narrow(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """AVX-512 on a CPU of another maker than MKL's."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkl.is_available()
    return wide and cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8")


def onednn_mm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`LinearOps.mm`; other dtypes, autocast and small products go to the reference."""
    rows = math.prod(x.shape[:-1])
    if (
        rows * weight.numel() < MIN_MULTIPLICATIONS
        or x.dtype != torch.float32
        or weight.dtype != torch.float32
        or torch.is_autocast_enabled("cpu")
    ):
        return reference_mm(x, weight, bias)
    flat = x.reshape(rows, x.shape[-1])
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        out = _OneDnnLinear.apply(flat, weight, bias)
    else:
        out = _product(flat, weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] @ weight [out, in]ᵀ + bias; any strides."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    """The product with its gradients, each of which is again one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.T) if for_x else None,
            _product(grad.T, x.T) if for_weight else None,
            grad.sum(0) if for_bias else None,
        )
