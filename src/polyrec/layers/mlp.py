"""The gated feed-forward block: one product for gate and up, SwiGLU, one product down."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn

from ..hardware.ops import ActOps, PlatformOps
from ..hardware.ops.linear import QuantizedRows
from .choices import LayerChoices
from .linear import Linear, PendingProduct, make_linear


class GatedMLP(nn.Module):
    """x [T, D], or its quantised rows -> [T, D] through I hidden units, for an `RMSNorm`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, ops: PlatformOps, choices: LayerChoices | None = None
    ) -> None:
        super().__init__()
        choices = choices or LayerChoices()
        parts = (intermediate_size, intermediate_size)
        self.gate_up_proj = make_linear(hidden_size, parts, bias=False, ops=ops.linear, choices=choices)
        self.down_proj = make_linear(
            intermediate_size, (hidden_size,), bias=False, ops=ops.linear, choices=choices, before_norm=True
        )
        self._activate_and_multiply = ops.act.silu_and_mul_mm
        self._activate: Callable[[Tensor], Tensor | QuantizedRows] = ops.act.silu_and_mul
        if choices.activations_quantize:
            self._activate = functools.partial(_activate_quantized, ops.act)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor | PendingProduct:
        return self.down_proj(self._activate(self.gate_up_proj(x)))

    def project(self, gate_up: Tensor) -> Tensor:
        """For training: the rest after the first product, keeping no activations for the backward pass of the second."""
        assert isinstance(self.down_proj, Linear), "quantised layers have no gradient"
        return self._activate_and_multiply(gate_up, self.down_proj.weight, self.down_proj.bias)


def _activate_quantized(ops: ActOps, x: Tensor) -> QuantizedRows:
    return QuantizedRows(*ops.silu_and_mul_fp8(x))
