"""Linear layers, plain and quantised; several projections of one input are one product, split by views.

Quantised layers are for inference: they hold e4m3 weights and fp32 scales, and none of it has a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError
from ..hardware.ops import LinearOps
from ..hardware.ops.linear import BLOCK, QuantizedRows
from ..hardware.ops.spec import FP8
from .choices import LayerChoices, WeightForm

FP8_MULTIPLE = 16  # e4m3 products take sizes that are multiples of this


class Linear(nn.Module):
    """x [..., in] -> [..., sum(parts)]. parts: output sizes of the projections merged here (one, or q/k/v, or gate/up)."""

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, ...],
        *,
        bias: bool,
        ops: LinearOps,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts), in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(sum(parts), dtype=dtype)) if bias else None
        self._mm = ops.mm

    def forward(self, x: Tensor) -> Tensor:
        return self._mm(x, self.weight, self.bias)


class Fp8Linear(nn.Module):
    """x [T, in], or its quantised rows -> [T, sum(parts)] in `dtype`: e4m3 weight with an fp32 scale per output channel.

    pending: the product is left to the norm that takes it. Sizes that are no multiple of 16 are `quantization_sizes`.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, ...],
        *,
        bias: bool,
        ops: LinearOps,
        dtype: torch.dtype,
        pending: bool = False,
    ) -> None:
        super().__init__()
        out_features = sum(parts)
        if in_features % FP8_MULTIPLE or out_features % FP8_MULTIPLE:
            raise _sizes_refused("fp8 products", in_features, parts, f"multiples of {FP8_MULTIPLE}")
        self.parts = self.scale_parts = parts
        self.weight = _fixed(torch.empty(out_features, in_features, dtype=FP8))
        self.weight_scale = _fixed(torch.empty(out_features, 1, dtype=torch.float32))
        self.bias = _fixed(torch.zeros(out_features, dtype=dtype)) if bias else None
        self._dtype = dtype
        self._quantize = ops.quantize_fp8
        self._scaled_mm = ops.scaled_mm
        self._pending = pending

    def forward(self, x: Tensor | QuantizedRows) -> Tensor | PendingProduct:
        rows = x if isinstance(x, QuantizedRows) else QuantizedRows(*self._quantize(x))
        return PendingProduct(rows, self) if self._pending else self.multiply(rows)

    def multiply(self, rows: QuantizedRows) -> Tensor:
        """rows [T, in] -> [T, sum(parts)]."""
        return self._scaled_mm(*rows, self.weight, self.weight_scale, self.bias, self._dtype)


class PendingProduct(NamedTuple):
    """A block's last product before it is computed: rows [T, in], and the layer that multiplies them. A norm that quantises
    computes it in its own operation."""

    rows: QuantizedRows
    linear: Fp8Linear

    def computed(self) -> Tensor:
        """[T, out]."""
        return self.linear.multiply(self.rows)


class Fp8BlockLinear(nn.Module):
    """x [T, in] -> [T, sum(parts)] in `dtype`: e4m3 weight with an fp32 scale per 128 x 128 weights.

    Sizes whose blocks would reach over a projection's end are `quantization_sizes`.
    """

    def __init__(
        self, in_features: int, parts: tuple[int, ...], *, bias: bool, ops: LinearOps, dtype: torch.dtype
    ) -> None:
        super().__init__()
        out_features = sum(parts)
        if in_features % BLOCK or any(part % BLOCK for part in parts[:-1]):
            raise _sizes_refused("scales per 128 x 128 weights", in_features, parts, f"multiples of {BLOCK}")
        self.parts = parts
        self.scale_parts = tuple(-(-part // BLOCK) for part in parts)
        self.weight = _fixed(torch.empty(out_features, in_features, dtype=FP8))
        self.weight_scale = _fixed(torch.empty(sum(self.scale_parts), in_features // BLOCK, dtype=torch.float32))
        self.bias = _fixed(torch.zeros(out_features, dtype=dtype)) if bias else None
        self._dtype = dtype
        self._quantize = ops.quantize_fp8_blocks
        self._block_scaled_mm = ops.block_scaled_mm

    def forward(self, x: Tensor) -> Tensor:
        out = self._block_scaled_mm(*self._quantize(x), self.weight, self.weight_scale, self._dtype)
        return out if self.bias is None else out + self.bias


def make_linear(
    in_features: int,
    parts: tuple[int, ...],
    *,
    bias: bool,
    ops: LinearOps,
    choices: LayerChoices,
    before_norm: bool = False,
) -> Linear | Fp8Linear | Fp8BlockLinear:
    """The layer of the form that was chosen. before_norm: an `RMSNorm` takes its result, which may be a `PendingProduct`."""
    forms: dict[WeightForm, Callable[..., Linear | Fp8Linear | Fp8BlockLinear]] = {
        "plain": Linear,
        "fp8": functools.partial(Fp8Linear, pending=before_norm and choices.norms_multiply),
        "fp8_blocks": Fp8BlockLinear,
    }
    return forms[choices.weights](in_features, parts, bias=bias, ops=ops, dtype=choices.dtype)


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _sizes_refused(what: str, in_features: int, parts: tuple[int, ...], wanted: str) -> CheckpointError:
    return CheckpointError(
        "quantization_sizes",
        f"{what} need sizes that are {wanted}; this model has a layer from {in_features} to {' + '.join(map(str, parts))}.",
        "Run this model without quantisation (--quantization none).",
    )
