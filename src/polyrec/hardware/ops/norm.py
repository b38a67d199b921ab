"""Normalisation ops and their meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .draw import Draw
from .linear import Fp8Rows, mm, quantize_fp8, scaled_mm
from .spec import FP8, INFER, TOLERANCES, TRAIN, Case, Lookup, Tolerance, at_least_fp32, op, reference_group


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] · rsqrt(mean(x²) + eps) · weight [D]; the mean in fp32 (Zhang and Sennrich, 2019)."""
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and residual [..., D] -> (rms_norm(x + residual) [..., D], x + residual): the residual stream grows by x."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def add_rms_norm_mm(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of x and residual [..., D], then `mm` with weight [out, D] -> ([..., out], x + residual [..., D]).

    For training: whoever computes both can keep the sum alone for the backward pass, and make the normed rows again there.
    """
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return mm(normed, weight, bias), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., D] less its mean, over its standard deviation, · weight [D] + bias [D] (Ba et al., 2016); moments in fp32."""
    wide = at_least_fp32(x)
    weight, bias = weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype)
    return torch.nn.functional.layer_norm(wide, (x.shape[-1],), weight, bias, eps).to(x.dtype)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """`rms_norm`, then `quantize_fp8` of each row: -> (e4m3 [..., D], scale fp32 [..., 1])."""
    return quantize_fp8(rms_norm(x, weight, eps))


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`add_rms_norm` with its first result quantised: -> (e4m3 [..., D], scale fp32 [..., 1], x + residual)."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return *quantize_fp8(normed), total


def mm_add_rms_norm_fp8(
    q: Tensor,
    q_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`scaled_mm` of q [T, in] and weight [D, in] in residual's dtype, then `add_rms_norm_fp8` of it and residual [T, D]:
    -> (e4m3 [T, D], scale fp32 [T, 1], product + residual [T, D])."""
    product = scaled_mm(q, q_scale, weight, weight_scale, bias, residual.dtype)
    return add_rms_norm_fp8(product, residual, norm_weight, eps)


def _norm_cases(draw: Draw) -> Iterator[Case]:
    for rows, size in ((3, 64), (17, 128), (1, 1000))[: 3 if draw.full else 1]:
        yield {"x": draw.normal(rows, size, scale=3), "weight": draw.uniform(size, low=0.5, high=1.5), "eps": 1e-6}


def _add_norm_cases(draw: Draw) -> Iterator[Case]:
    for case in _norm_cases(draw):
        yield {"x": case["x"], "residual": draw.normal(*case["x"].shape), **case}


def _add_norm_mm_cases(draw: Draw) -> Iterator[Case]:
    for case, out_features in zip(_add_norm_cases(draw), (32, 100, 7), strict=False):
        size = case["x"].shape[-1]
        yield {
            "x": case["x"],
            "residual": case["residual"],
            "norm_weight": case["weight"],
            "eps": case["eps"],
            "weight": draw.normal(out_features, size, scale=size**-0.5),
            "bias": draw.normal(out_features) if out_features == 100 else None,
        }


def _mm_add_norm_fp8_cases(draw: Draw) -> Iterator[Case]:
    for rows, inputs, size in ((3, 64, 32), (17, 128, 208))[: 2 if draw.full else 1]:
        q, q_scale = quantize_fp8(draw.normal(rows, inputs, dtype=torch.float32))
        weight, weight_scale = quantize_fp8(draw.normal(size, inputs, scale=inputs**-0.5, dtype=torch.float32))
        case: Case = {"q": q, "q_scale": q_scale, "weight": weight, "weight_scale": weight_scale}
        case |= {"residual": draw.normal(rows, size), "norm_weight": draw.uniform(size, low=0.5, high=1.5), "eps": 1e-6}
        yield {**case, "bias": draw.normal(size)}
        if draw.full:
            yield {**case, "bias": None}


def _layer_norm_cases(draw: Draw) -> Iterator[Case]:
    for case in _norm_cases(draw):
        yield {**case, "bias": draw.normal(*case["weight"].shape)}
        if draw.full:
            yield {**case, "bias": None}


def _decompose_add_rms_norm(op: Lookup) -> Callable[..., tuple[Tensor, Tensor]]:
    rms_norm = op("norm.rms_norm")

    def add_then_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return rms_norm(total, weight, eps), total

    return add_then_norm


def _decompose_add_rms_norm_mm(op: Lookup) -> Callable[..., tuple[Tensor, Tensor]]:
    add_rms_norm, mm = op("norm.add_rms_norm"), op("linear.mm")

    def norm_then_multiply(
        x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        normed, total = add_rms_norm(x, residual, norm_weight, eps)
        return mm(normed, weight, bias), total

    return norm_then_multiply


def _decompose_layer_norm(op: Lookup) -> Callable[..., Tensor]:
    rms_norm = op("norm.rms_norm")

    def center_then_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide = at_least_fp32(x)
        normed = rms_norm(wide - wide.mean(-1, keepdim=True), weight.to(wide.dtype), eps)
        return (normed if bias is None else normed + bias.to(wide.dtype)).to(x.dtype)

    return center_then_norm


def _decompose_rms_norm_fp8(op: Lookup) -> Callable[..., Fp8Rows]:
    rms_norm, quantize = op("norm.rms_norm"), op("linear.quantize_fp8")

    def norm_then_quantize(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
        return quantize(rms_norm(x, weight, eps))

    return norm_then_quantize


def _decompose_add_rms_norm_fp8(op: Lookup) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    add_rms_norm, quantize = op("norm.add_rms_norm"), op("linear.quantize_fp8")

    def add_norm_then_quantize(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed, total = add_rms_norm(x, residual, weight, eps)
        return *quantize(normed), total

    return add_norm_then_quantize


def _decompose_mm_add_rms_norm_fp8(op: Lookup) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    scaled_mm, add_rms_norm_fp8 = op("linear.scaled_mm"), op("norm.add_rms_norm_fp8")

    def multiply_then_norm(
        q: Tensor,
        q_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        product = scaled_mm(q, q_scale, weight, weight_scale, bias, residual.dtype)
        normed: tuple[Tensor, Tensor, Tensor] = add_rms_norm_fp8(product, residual, norm_weight, eps)
        return normed

    return multiply_then_norm


@dataclass(frozen=True)
class NormOps:
    """Norms over the last dim, alone, with the residual's sum, and with quantised rows."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = field(
        metadata=op(rms_norm, "x [..., D], weight [D] -> [..., D]", _norm_cases, tier="R", strided=("x",))
    )
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = field(
        metadata=op(
            add_rms_norm,
            "x, residual [..., D], weight [D] -> [..., D], [..., D]",
            _add_norm_cases,
            tier="D",
            needs=("norm.rms_norm",),
            decompose=_decompose_add_rms_norm,
            strided=("x", "residual"),
        )
    )
    add_rms_norm_mm: Callable[[Tensor, Tensor, Tensor, float, Tensor, Tensor | None], tuple[Tensor, Tensor]] = field(
        metadata=op(
            add_rms_norm_mm,
            "x, residual [..., D], norm_weight [D], weight [out, D], bias [out] or None -> [..., out], [..., D]",
            _add_norm_mm_cases,
            tier="D",
            modes=TRAIN,
            needs=("norm.add_rms_norm", "linear.mm"),
            decompose=_decompose_add_rms_norm_mm,
            strided=("x", "residual"),
        )
    )
    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor] = field(
        metadata=op(
            layer_norm,
            "x [..., D], weight [D], bias [D] or None -> [..., D]",
            _layer_norm_cases,
            tier="D",
            needs=("norm.rms_norm",),
            decompose=_decompose_layer_norm,
            strided=("x",),
        )
    )
    rms_norm_fp8: Callable[[Tensor, Tensor, float], Fp8Rows] = field(
        metadata=op(
            rms_norm_fp8,
            "x [..., D], weight [D] -> e4m3 [..., D], fp32 [..., 1]",
            _norm_cases,
            tier="D",
            modes=INFER,
            needs=("norm.rms_norm", "linear.quantize_fp8"),
            decompose=_decompose_rms_norm_fp8,
            strided=("x",),
        )
    )
    add_rms_norm_fp8: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]] = field(
        metadata=op(
            add_rms_norm_fp8,
            "x, residual [..., D], weight [D] -> e4m3 [..., D], fp32 [..., 1], [..., D]",
            _add_norm_cases,
            tier="D",
            modes=INFER,
            needs=("norm.add_rms_norm", "linear.quantize_fp8"),
            decompose=_decompose_add_rms_norm_fp8,
            strided=("x", "residual"),
        )
    )
    mm_add_rms_norm_fp8: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]
    ] = field(
        metadata=op(
            mm_add_rms_norm_fp8,
            "q e4m3 [T, in], q_scale fp32 [T, 1], weight e4m3 [D, in], weight_scale fp32 [D, 1], bias [D] or None, "
            "residual [T, D], norm_weight [D] -> e4m3 [T, D], fp32 [T, 1], [T, D]; in and D multiples of 16",
            _mm_add_norm_fp8_cases,
            tier="D",
            modes=INFER,
            # The product is rounded too, which shows where the residual leaves little of it.
            tolerance={**TOLERANCES, FP8: Tolerance(TOLERANCES[FP8].relative, 2.0)},
            needs=("linear.scaled_mm", "norm.add_rms_norm_fp8"),
            decompose=_decompose_mm_add_rms_norm_fp8,
            strided=("residual",),
        )
    )


REFERENCE_NORM_OPS = reference_group(NormOps)
