"""Gated activations through npu_swiglu."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....ops.act import ActOps, gelu_and_mul, silu_and_mul_mm
from ....ops.spec import partial_group


class AscendAct:
    """library: torch_npu."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """npu_swiglu: silu of the first half of a dim, times the second; with a gradient."""
        return self._library.npu_swiglu(x, dim=-1)


def act_ops(library: Any) -> ActOps:
    """Without fp8. `gelu_and_mul` is torch's: npu_gelu_mul ends at 1,024 columns and has no gradient."""
    own = AscendAct(library)
    return partial_group(
        ActOps,
        silu_and_mul=own.silu_and_mul,
        silu_and_mul_mm=silu_and_mul_mm,  # in its parts: training asks for it only where it keeps less than they do
        gelu_and_mul=gelu_and_mul,
    )
