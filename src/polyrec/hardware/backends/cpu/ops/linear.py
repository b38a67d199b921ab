"""fp32 matrix products through oneDNN where torch's own choice, MKL, leaves the CPU's widest instructions unused.

On AMD CPUs with AVX-512, MKL runs its AVX2 code: 110 GFLOP/s a core on an EPYC of 2025 for 1,600 x 128 by 512 x 128, where
oneDNN reaches 245. torch offers oneDNN's fp32 product only as `torch.ops.mkldnn._linear_pointwise`, the op that its compiler
emits; it has no gradient, so only inference uses it. Everywhere else the reference (torch's choice) is already the fast one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ....ops.linear import REFERENCE_LINEAR_OPS, LinearOps
from ....ops.linear import mm as reference_mm

BLOCK_ROWS = 512


def cpu_linear_ops() -> LinearOps:
    """The products for this machine; the same machine always gets the same, so that runs repeat bit for bit."""
    if has_onednn_mm() and mkl_is_narrow():
        return replace(REFERENCE_LINEAR_OPS, mm=onednn_mm)
    return REFERENCE_LINEAR_OPS


def has_onednn_mm() -> bool:
    """Whether this torch has the op."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def mkl_is_narrow(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """AVX-512 on a CPU of another maker than MKL's."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkl.is_available()
    return wide and cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8")


def onednn_mm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`LinearOps.mm` without gradients, in blocks of BLOCK_ROWS; the rest, other dtypes and training go to the reference.

    oneDNN prepares and keeps each shape it meets (0.1 to 1.2 MB), and every batch has another number of rows: whole batches
    would fill memory, and in training eat what the faster kernel saves (measured). Blocks give it one shape a weight.
    """
    rows = math.prod(x.shape[:-1])
    if (
        rows < BLOCK_ROWS
        or x.dtype != torch.float32
        or weight.dtype != torch.float32
        or torch.is_autocast_enabled("cpu")
        or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    ):
        return reference_mm(x, weight, bias)
    flat = x.reshape(rows, x.shape[-1])
    whole = rows - rows % BLOCK_ROWS
    blocks = [
        torch.ops.mkldnn._linear_pointwise(block, weight, bias, "none", [], "")
        for block in flat[:whole].split(BLOCK_ROWS)
    ]
    if whole < rows:
        blocks.append(reference_mm(flat[whole:], weight, bias))
    return torch.cat(blocks).view(*x.shape[:-1], weight.shape[0])
