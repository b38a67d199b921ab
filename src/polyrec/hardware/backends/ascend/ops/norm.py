"""Norms through npu_rms_norm (which has a gradient) and npu_add_rms_norm (which has none)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....ops.norm import NormOps, add_rms_norm_mm, layer_norm
from ....ops.norm import add_rms_norm as reference_add_rms_norm
from ....ops.norm import rms_norm as reference_rms_norm
from ....ops.spec import op_claims, partial_group


class AscendNorm:
    """library: torch_npu. Its kernels take one dtype; under autocast weights are wider than activations, and torch norms."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """npu_rms_norm: 2 to 8 dims -> (normed, 1 / root mean square)."""
        if x.dtype != weight.dtype:
            return reference_rms_norm(x, weight, eps)
        rows = x if x.dim() > 1 else x[None]
        return self._library.npu_rms_norm(rows, weight, epsilon=eps)[0].view(x.shape)

    @op_claims(train=False)  # torch_npu's derivatives.yaml does not list it
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """npu_add_rms_norm: -> (normed, 1 / root mean square, sum)."""
        if not x.dtype == residual.dtype == weight.dtype:
            return reference_add_rms_norm(x, residual, weight, eps)
        normed, _, total = self._library.npu_add_rms_norm(x, residual, weight, epsilon=eps)
        return normed, total


def norm_ops(library: Any) -> NormOps:
    """Without those that make fp8."""
    own = AscendNorm(library)
    return partial_group(
        NormOps,
        rms_norm=own.rms_norm,
        add_rms_norm=own.add_rms_norm,
        add_rms_norm_mm=add_rms_norm_mm,  # in its parts: training asks for it only where it keeps less than they do
        layer_norm=layer_norm,
    )
