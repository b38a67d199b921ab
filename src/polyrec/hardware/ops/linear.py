"""Matrix products, plain, quantised and grouped, and their meaning.

Quantised values are e4m3 with fp32 scales: value = quantised · scale. Products of quantised values are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .draw import Draw
from .spec import FP8, INFER, Case, at_least_fp32, op, op_claims, reference_group

Fp8Rows = tuple[Tensor, Tensor]


class QuantizedRows(NamedTuple):
    """e4m3 values [T, D] and fp32 scale [T, 1] of each row: what a norm, SwiGLU or attention hands to a product of e4m3."""

    values: Tensor
    scale: Tensor


FP8_MAX = 448.0  # the largest e4m3 number
BLOCK = 128  # values that share a scale in block-scaled products (DeepSeek-V3, 2024)
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def mm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] @ weight [out, in]ᵀ + bias [out] or None -> [..., out]."""
    return torch.nn.functional.linear(x, weight, bias)


def quantize_fp8(x: Tensor) -> Fp8Rows:
    """x [..., D] -> (e4m3 [..., D], scale fp32 [..., 1]), scale = max |row| / 448, so that x ≈ e4m3 · scale.

    A row of zeros becomes zeros with the smallest normal fp32 number as its scale.
    """
    wide = at_least_fp32(x)
    scale = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(_SMALLEST_SCALE)
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale.float()


def quantize_fp8_blocks(x: Tensor) -> Fp8Rows:
    """`quantize_fp8` of each 128 values of a row: x [..., in] -> (e4m3 [..., in], scale fp32 [..., in / 128])."""
    quantized, scale = quantize_fp8(x.unflatten(-1, (-1, BLOCK)))
    return quantized.flatten(-2), scale.squeeze(-1)


def scaled_mm(
    q: Tensor, q_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """q e4m3 [T, in] with q_scale fp32 [T, 1], weight e4m3 [out, in] with weight_scale fp32 [out, 1], bias [out] or None
    -> [T, out] in out_dtype: one scale a row of the activations and one a channel of the weight."""
    wide = q_scale.dtype
    total = torch.nn.functional.linear(q.to(wide), weight.to(wide)) * q_scale * weight_scale.T
    return (total if bias is None else total + bias.to(wide)).to(out_dtype)


def block_scaled_mm(q: Tensor, q_scale: Tensor, weight: Tensor, weight_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """q e4m3 [T, in] with q_scale fp32 [T, in / 128], weight e4m3 [out, in] with weight_scale fp32 [⌈out / 128⌉, in / 128]
    -> [T, out] in out_dtype: one scale for 128 activations and one for 128 x 128 weights; in is a multiple of 128."""
    wide, (blocks_out, blocks_in) = q_scale.dtype, weight_scale.shape
    rows = q.to(wide) * q_scale.unsqueeze(-1).expand(-1, -1, BLOCK).flatten(1)
    scale = weight_scale[:, None, :, None].expand(-1, BLOCK, -1, BLOCK).reshape(blocks_out * BLOCK, blocks_in * BLOCK)
    return torch.nn.functional.linear(rows, weight.to(wide) * scale[: len(weight)]).to(out_dtype)


@op_claims(graph_safe=False)  # reads group_sizes on the host
def grouped_mm(x: Tensor, weight: Tensor, group_sizes: Tensor) -> Tensor:
    """x [T, in], whose rows are sorted by group, weight [E, out, in], group_sizes int64 [E] that add up to T -> [T, out]:
    each row times its own group's weightᵀ."""
    parts = x.split(group_sizes.tolist())
    return torch.cat([torch.nn.functional.linear(part, own) for part, own in zip(parts, weight, strict=True)])


def _mm_cases(draw: Draw) -> Iterator[Case]:
    for rows, inputs, outputs in ((3, 64, 24), (17, 128, 200), (1, 24, 1))[: 3 if draw.full else 1]:
        case = {"x": draw.normal(rows, inputs), "weight": draw.normal(outputs, inputs, scale=inputs**-0.5)}
        yield {**case, "bias": draw.normal(outputs)}
        if draw.full:
            yield {**case, "bias": None}


def _quantize_cases(draw: Draw) -> Iterator[Case]:
    yield {"x": draw.normal(3, 64)}
    if draw.full:
        x = draw.normal(17, 256, scale=3)
        x[5] = 0
        yield {"x": x}


def _quantize_blocks_cases(draw: Draw) -> Iterator[Case]:
    yield {"x": draw.normal(3, BLOCK)}
    if draw.full:
        x = draw.normal(17, 3 * BLOCK, scale=3)
        x[5, :BLOCK] = 0
        yield {"x": x}


def _scaled_mm_cases(draw: Draw) -> Iterator[Case]:
    for rows, inputs, outputs in ((3, 64, 32), (17, 128, 208))[: 2 if draw.full else 1]:
        q, q_scale = quantize_fp8(draw.normal(rows, inputs, dtype=torch.float32))
        weight, weight_scale = quantize_fp8(draw.normal(outputs, inputs, scale=inputs**-0.5, dtype=torch.float32))
        case = {"q": q, "q_scale": q_scale, "weight": weight, "weight_scale": weight_scale}
        yield {**case, "bias": draw.normal(outputs), "out_dtype": draw.dtype}
        if draw.full:
            yield {**case, "bias": None, "out_dtype": draw.dtype}


def _block_scaled_mm_cases(draw: Draw) -> Iterator[Case]:
    for rows, inputs, outputs in ((3, 128, 32), (17, 256, 208))[: 2 if draw.full else 1]:
        q, q_scale = quantize_fp8_blocks(draw.normal(rows, inputs, dtype=torch.float32))
        yield {
            "q": q,
            "q_scale": q_scale,
            "weight": draw.normal(outputs, inputs, dtype=torch.float32).to(FP8),
            "weight_scale": draw.uniform(
                -(-outputs // BLOCK), inputs // BLOCK, low=0.5 * inputs**-0.5, high=inputs**-0.5, dtype=torch.float32
            ),
            "out_dtype": draw.dtype,
        }


def _grouped_mm_cases(draw: Draw) -> Iterator[Case]:
    for rows, groups, inputs, outputs in ((10, 4, 64, 16), (40, 16, 32, 64))[: 2 if draw.full else 1]:
        yield {
            "x": draw.normal(rows, inputs),
            "weight": draw.normal(groups, outputs, inputs, scale=inputs**-0.5),
            "group_sizes": torch.bincount(draw.integers(0, groups, rows), minlength=groups),
        }


@dataclass(frozen=True)
class LinearOps:
    """Products with a weight [out, in], and the quantisers whose results the scaled ones take."""

    mm: Callable[[Tensor, Tensor, Tensor | None], Tensor] = field(
        metadata=op(
            mm, "x [..., in], weight [out, in], bias [out] or None -> [..., out]", _mm_cases, tier="R", strided=("x",)
        )
    )
    quantize_fp8: Callable[[Tensor], Fp8Rows] = field(
        metadata=op(
            quantize_fp8,
            "x [..., D] -> e4m3 [..., D], fp32 [..., 1]",
            _quantize_cases,
            tier="X",
            modes=INFER,
            strided=("x",),
        )
    )
    quantize_fp8_blocks: Callable[[Tensor], Fp8Rows] = field(
        metadata=op(
            quantize_fp8_blocks,
            "x [..., in] -> e4m3 [..., in], fp32 [..., in / 128]",
            _quantize_blocks_cases,
            tier="X",
            modes=INFER,
            strided=("x",),
        )
    )
    scaled_mm: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor] = field(
        metadata=op(
            scaled_mm,
            "q e4m3 [T, in], q_scale fp32 [T, 1], weight e4m3 [out, in], weight_scale fp32 [out, 1], bias [out] or None "
            "-> out_dtype [T, out]; in and out multiples of 16",
            _scaled_mm_cases,
            tier="X",
            modes=INFER,
        )
    )
    block_scaled_mm: Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor] = field(
        metadata=op(
            block_scaled_mm,
            "q e4m3 [T, in], q_scale fp32 [T, in / 128], weight e4m3 [out, in], weight_scale fp32 [⌈out / 128⌉, in / 128] "
            "-> out_dtype [T, out]",
            _block_scaled_mm_cases,
            tier="X",
            modes=INFER,
        )
    )
    grouped_mm: Callable[[Tensor, Tensor, Tensor], Tensor] = field(
        metadata=op(
            grouped_mm,
            "x [T, in] sorted by group, weight [E, out, in], group_sizes int64 [E] -> [T, out]",
            _grouped_mm_cases,
            tier="X",
        )
    )


REFERENCE_LINEAR_OPS = reference_group(LinearOps)
