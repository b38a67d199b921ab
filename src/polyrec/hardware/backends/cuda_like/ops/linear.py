"""Products of e4m3 tensors and of groups on devices that have them, and the quantisers as Triton kernels."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import torch
from torch import Tensor

from ....ops import linear as reference
from ....ops.linear import BLOCK, REFERENCE_LINEAR_OPS, Fp8Rows, LinearOps
from ....ops.spec import FP8, op_claims
from ..differences import NVIDIA, build_of
from . import few_rows
from .launch import kernels, runs_kernel


def scaled_mm(
    q: Tensor, q_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`LinearOps.scaled_mm` in bf16 through torch._scaled_mm, whose row and channel scales and bias are part of the kernel.

    It gives no other dtype with such scales, so those go to the reference, as do devices without e4m3 products. Sums stay in
    the matrix units, of which Hopper's keep about 14 bits (DeepSeek-V3, 2024): more than bf16's 8, fewer than fp32's 24.
    """
    if out_dtype != torch.bfloat16 or not multiplies_fp8(q.device):
        return reference.scaled_mm(q, q_scale, weight, weight_scale, bias, out_dtype)
    _ask_for_no_workspace(q.device)
    return torch._scaled_mm(
        q,
        weight.t(),
        scale_a=q_scale,
        scale_b=weight_scale.t(),
        bias=bias if bias is None or bias.dtype == out_dtype else bias.to(out_dtype),
        out_dtype=out_dtype,
        use_fast_accum=True,
    )


def scaled_mm_by_rows(
    q: Tensor, q_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`LinearOps.scaled_mm`: of few rows through a Triton kernel, in every dtype; of others as `scaled_mm`."""
    product = q, q_scale, weight, weight_scale, bias
    if (tiling := _few_rows_tiling(q, weight)) is None:
        return scaled_mm(*product, out_dtype)
    out = q.new_empty((len(q), len(weight)), dtype=out_dtype)
    run = kernels("few_rows_mm")
    if (partial := _partial(*product, out_dtype, tiling)) is None:
        run.few_rows_scaled_mm(*product, out, tiling, exact=out_dtype != torch.bfloat16)
    else:
        run.few_rows_scaled_mm_sum(partial, q_scale, weight_scale, bias, out)
    return out


def scaled_mm_parts(
    q: Tensor, q_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor | None:
    """The sums that `scaled_mm_by_rows` would add up, fp32 [splits, T, out], for who adds them; None: it cuts no inputs."""
    tiling = _few_rows_tiling(q, weight)
    return None if tiling is None else _partial(q, q_scale, weight, weight_scale, bias, out_dtype, tiling)


def _few_rows_tiling(q: Tensor, weight: Tensor) -> few_rows.Tiling | None:
    """Of the kernel for few rows; None where the product is not its own."""
    (rows, inputs), outputs = q.shape, len(weight)
    if not (few_rows.takes(rows, outputs) and runs_kernel(q) and is_tuned(q.device)):
        return None
    return few_rows.tiling(rows, outputs, inputs)


def _partial(
    q: Tensor,
    q_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tiling: few_rows.Tiling,
) -> Tensor | None:
    """The parts' sums; None where there is one part."""
    if tiling.splits == 1:
        return None
    partial = q.new_empty((tiling.splits, len(q), len(weight)), dtype=torch.float32)
    exact = out_dtype != torch.bfloat16
    kernels("few_rows_mm").few_rows_scaled_mm(q, q_scale, weight, weight_scale, bias, partial, tiling, exact=exact)
    return partial


def block_scaled_mm(q: Tensor, q_scale: Tensor, weight: Tensor, weight_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`LinearOps.block_scaled_mm` through a Triton kernel, which sums each block apart."""
    if not runs_kernel(q):
        return reference.block_scaled_mm(q, q_scale, weight, weight_scale, out_dtype)
    out = q.new_empty((len(q), len(weight)), dtype=out_dtype)
    kernels("block_mm").block_scaled_mm(q, q_scale, weight, weight_scale, out)
    return out


def quantize_fp8(x: Tensor) -> Fp8Rows:
    """`LinearOps.quantize_fp8`."""
    if not runs_kernel(x):
        return reference.quantize_fp8(x)
    out, scale = x.new_empty(x.shape, dtype=FP8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    kernels("quantize").quantize(x, out, scale)
    return out, scale


def quantize_fp8_blocks(x: Tensor) -> Fp8Rows:
    """`LinearOps.quantize_fp8_blocks`: blocks are short rows."""
    if not runs_kernel(x):
        return reference.quantize_fp8_blocks(x)
    blocks = x.shape[-1] // BLOCK
    out, scale = x.new_empty(x.shape, dtype=FP8), x.new_empty((*x.shape[:-1], blocks), dtype=torch.float32)
    kernels("quantize").quantize(x.unflatten(-1, (blocks, BLOCK)), out, scale)
    return out, scale


@op_claims(graph_safe=False)  # in bf16 it is; the reference, to which the rest goes, reads group_sizes on the host
def grouped_mm(x: Tensor, weight: Tensor, group_sizes: Tensor) -> Tensor:
    """`LinearOps.grouped_mm` in bf16 through torch._grouped_mm, which reads the sizes on the device, where rows are whole
    16 bytes; the rest goes to the reference."""
    _, out_features, in_features = weight.shape
    if (
        x.dtype != torch.bfloat16
        or weight.dtype != torch.bfloat16
        or in_features % 8
        or out_features % 8
        or not (runs_kernel(x, weight) and multiplies_groups(x.device))
    ):
        return reference.grouped_mm(x, weight, group_sizes)
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=group_sizes.cumsum(0, dtype=torch.int32))


@functools.cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device has e4m3 products; it never changes, and asking takes longer than a small product's launch."""
    if device.type != "cuda" or build_of(torch) != NVIDIA.build:
        return False
    return torch.cuda.get_device_capability(device) >= (NVIDIA.fp8_from or ())


@functools.cache
def is_tuned(device: torch.device) -> bool:
    """Whether the tiles for few rows were chosen for the device's kind: Hopper."""
    return multiplies_fp8(device) and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _ask_for_no_workspace(device: torch.device) -> None:
    """Before the process's first product, on Hopper: cuBLASLt then takes kernels whose tiles are assigned beforehand.

    Given work space, it takes ones that draw their tiles from a counter there, which a memset must clear before each product.
    They are no faster, and in a graph the memset costs 1.6 to 3 us: 2,560 rows and the 1.7B model's weights take 33.7, 22.8,
    89.2 and 51.7 us with it, 32.0, 21.2, 86.1 and 49.7 without (H200, CUDA 13). torch reads the variable once, for its products
    with a bias too; a value that the user has set stays.
    """
    if is_tuned(device):
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")


@functools.cache
def multiplies_groups(device: torch.device) -> bool:
    """Whether this torch has the kernel of grouped products for the device: written for Hopper and later."""
    if device.type != "cuda" or build_of(torch) != NVIDIA.build or not hasattr(torch, "_grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


CUDA_LIKE_LINEAR_OPS = replace(REFERENCE_LINEAR_OPS, scaled_mm=scaled_mm, grouped_mm=grouped_mm)


def linear_ops(fp8: bool) -> LinearOps:
    """Those with Triton's kernels. fp8: whether the device has e4m3; without it those results are the reference's."""
    if not fp8:
        return CUDA_LIKE_LINEAR_OPS
    return replace(
        CUDA_LIKE_LINEAR_OPS,
        quantize_fp8=quantize_fp8,
        quantize_fp8_blocks=quantize_fp8_blocks,
        scaled_mm=scaled_mm_by_rows,
        block_scaled_mm=block_scaled_mm,
    )
