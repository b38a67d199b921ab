"""RMSNorm over the residual stream, with plain or quantised results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..hardware.ops import NormOps
from .linear import QuantizedRows

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
        self._ops = ops
        self._open: Callable[[Tensor], Normed] = self._open_quantized if quantized else self._open_plain
        self._carry: Callable[[Tensor, Tensor], tuple[Normed, Tensor]] = (
            self._carry_quantized if quantized else self._carry_plain
        )

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Normed, Tensor]:
        """residual None: x opens the stream."""
        if residual is None:
            return self._open(x), x
        return self._carry(x, residual)

    def _open_plain(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def _carry_plain(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)

    def _open_quantized(self, x: Tensor) -> QuantizedRows:
        return QuantizedRows(*self._ops.rms_norm_fp8(x, self.weight, self.eps))

    def _carry_quantized(self, x: Tensor, residual: Tensor) -> tuple[QuantizedRows, Tensor]:
        values, scale, total = self._ops.add_rms_norm_fp8(x, residual, self.weight, self.eps)
        return QuantizedRows(values, scale), total
