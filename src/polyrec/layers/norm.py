"""RMSNorm over the residual stream, with plain or quantised results."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..hardware.ops import NormOps
from ..hardware.ops.linear import QuantizedRows
from .linear import Fp8BlockLinear, Fp8Linear, Linear, PendingProduct

Normed = Tensor | QuantizedRows


class RMSNorm(nn.Module):
    """norm(x, residual) -> (normalised x + residual, x + residual): the pair that travels through the stack.

    quantized: the normalised rows come as `QuantizedRows`, from the operation that also normalises.
    """

    def __init__(
        self, size: int, eps: float, ops: NormOps, *, quantized: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps
        self._open: Callable[[Tensor, Tensor, float], Normed] = ops.rms_norm
        self._carry: Callable[[Tensor, Tensor, Tensor, float], tuple[Normed, Tensor]] = ops.add_rms_norm
        self._carry_product: Callable[[PendingProduct, Tensor, Tensor, float], tuple[Normed, Tensor]]
        self._carry_product = functools.partial(_carry_product, ops)
        self._carry_and_multiply = ops.add_rms_norm_mm
        if quantized:
            self._open = functools.partial(_open_quantized, ops)
            self._carry = functools.partial(_carry_quantized, ops)
            self._carry_product = functools.partial(_carry_product_quantized, ops)

    def forward(self, x: Tensor | PendingProduct, residual: Tensor | None) -> tuple[Normed, Tensor]:
        """residual None: x, a tensor then, opens the stream."""
        if isinstance(x, PendingProduct):
            assert residual is not None, "no block's product opens a stream"
            return self._carry_product(x, residual, self.weight, self.eps)
        if residual is None:
            return self._open(x, self.weight, self.eps), x
        return self._carry(x, residual, self.weight, self.eps)

    def project(
        self, x: Tensor, residual: Tensor | None, linear: Linear | Fp8Linear | Fp8BlockLinear
    ) -> tuple[Tensor, Tensor]:
        """For training: -> (linear(norm), x + residual), keeping no normed rows for the backward pass of the product."""
        assert isinstance(linear, Linear), "quantised layers have no gradient"
        if residual is None:
            return linear(self._open(x, self.weight, self.eps)), x
        return self._carry_and_multiply(x, residual, self.weight, self.eps, linear.weight, linear.bias)


def _open_quantized(ops: NormOps, x: Tensor, weight: Tensor, eps: float) -> QuantizedRows:
    return QuantizedRows(*ops.rms_norm_fp8(x, weight, eps))


def _carry_quantized(
    ops: NormOps, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    values, scale, total = ops.add_rms_norm_fp8(x, residual, weight, eps)
    return QuantizedRows(values, scale), total


def _carry_product(
    ops: NormOps, product: PendingProduct, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return ops.add_rms_norm(product.computed(), residual, weight, eps)


def _carry_product_quantized(
    ops: NormOps, product: PendingProduct, residual: Tensor, weight: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    linear = product.linear
    values, scale, total = ops.mm_add_rms_norm_fp8(
        *product.rows, linear.weight, linear.weight_scale, linear.bias, residual, weight, eps
    )
    return QuantizedRows(values, scale), total
