"""Activation ops and their meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .draw import Draw
from .linear import Fp8Rows, mm, quantize_fp8
from .spec import INFER, TRAIN, Case, Lookup, op, reference_group


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 I] = [gate, up] -> silu(gate) · up [..., I] (SwiGLU; Shazeer, 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 I] = [gate, up] -> gelu(gate) · up [..., I], GELU in its tanh form, as in Gemma (GEGLU; Shazeer, 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def silu_and_mul_mm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`silu_and_mul` of x [..., 2 I], then `mm` with weight [out, I] -> [..., out].

    For training: whoever computes both can keep x alone for the backward pass, and make the activations again there.
    """
    return mm(silu_and_mul(x), weight, bias)


def silu_and_mul_fp8(x: Tensor) -> Fp8Rows:
    """`silu_and_mul`, then `quantize_fp8` of each row: -> (e4m3 [..., I], scale fp32 [..., 1])."""
    return quantize_fp8(silu_and_mul(x))


def _gated_cases(draw: Draw) -> Iterator[Case]:
    for rows, size in ((3, 32), (17, 128), (1, 500))[: 3 if draw.full else 1]:
        yield {"x": draw.normal(rows, 2 * size)}


def _gated_mm_cases(draw: Draw) -> Iterator[Case]:
    for case, out_features in zip(_gated_cases(draw), (32, 100, 7), strict=False):
        size = case["x"].shape[-1] // 2
        weight = draw.normal(out_features, size, scale=size**-0.5)
        yield {**case, "weight": weight, "bias": draw.normal(out_features) if out_features == 100 else None}


def _decompose_silu_and_mul_mm(op: Lookup) -> Callable[..., Tensor]:
    silu_and_mul, mm = op("act.silu_and_mul"), op("linear.mm")

    def activate_then_multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = mm(silu_and_mul(x), weight, bias)
        return product

    return activate_then_multiply


def _decompose_silu_and_mul_fp8(op: Lookup) -> Callable[..., Fp8Rows]:
    silu_and_mul, quantize = op("act.silu_and_mul"), op("linear.quantize_fp8")

    def activate_then_quantize(x: Tensor) -> Fp8Rows:
        return quantize(silu_and_mul(x))

    return activate_then_quantize


@dataclass(frozen=True)
class ActOps:
    """Gated activations: a function of the first half of the last dim, times the second half."""

    silu_and_mul: Callable[[Tensor], Tensor] = field(
        metadata=op(silu_and_mul, "x [..., 2 I] -> [..., I]", _gated_cases, tier="R", strided=("x",))
    )
    gelu_and_mul: Callable[[Tensor], Tensor] = field(
        metadata=op(gelu_and_mul, "x [..., 2 I] -> [..., I]", _gated_cases, tier="X", strided=("x",))
    )
    silu_and_mul_mm: Callable[[Tensor, Tensor, Tensor | None], Tensor] = field(
        metadata=op(
            silu_and_mul_mm,
            "x [..., 2 I], weight [out, I], bias [out] or None -> [..., out]",
            _gated_mm_cases,
            tier="D",
            modes=TRAIN,
            needs=("act.silu_and_mul", "linear.mm"),
            decompose=_decompose_silu_and_mul_mm,
            strided=("x",),
        )
    )
    silu_and_mul_fp8: Callable[[Tensor], Fp8Rows] = field(
        metadata=op(
            silu_and_mul_fp8,
            "x [..., 2 I] -> e4m3 [..., I], fp32 [..., 1]",
            _gated_cases,
            tier="D",
            modes=INFER,
            needs=("act.silu_and_mul", "linear.quantize_fp8"),
            decompose=_decompose_silu_and_mul_fp8,
            strided=("x",),
        )
    )


REFERENCE_ACT_OPS = reference_group(ActOps)
