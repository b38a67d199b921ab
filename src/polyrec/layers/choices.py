"""What is settled when a model is built: the form of its linear layers, and which fused operations it calls.

`forward` asks nothing of this again, so that every batch, and every captured graph, runs the same path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..hardware.ops import PlatformOps
from ..hardware.table import all_specs

WeightForm = Literal["plain", "fp8", "fp8_blocks"]


@dataclass(frozen=True)
class LayerChoices:
    """dtype: of activations and of weights that are not quantised.

    weights: of the layers' products. plain: in `dtype`; fp8: e4m3 with a scale per output channel, times rows with a scale
    each; fp8_blocks: e4m3 with a scale per 128 x 128 weights, times rows with a scale per 128 values.
    fused_rms_fp8, fused_silu_fp8: a norm or SwiGLU before such a product gives quantised rows itself. fused_mm_rms_fp8: such
    a norm also computes the product before it, which a block then leaves to it (`PendingProduct`). fused_qk_rope_kv: norms of
    query and key, rotation and cache write are one operation, or attention's own work where that has kernels for it; not where
    rope_is_replaced: a plugin's operation stands for one of them. Without them the same is done by the operations that they
    decompose into.
    """

    dtype: torch.dtype = torch.float32
    weights: WeightForm = "plain"
    fused_rms_fp8: bool = True
    fused_mm_rms_fp8: bool = True
    fused_silu_fp8: bool = True
    fused_qk_rope_kv: bool = True
    rope_is_replaced: bool = False

    @property
    def plans_rotate(self) -> bool:
        """Whether plans that can are left the rotation, beside the cache's write."""
        return self.fused_qk_rope_kv and not self.rope_is_replaced

    @property
    def norms_quantize(self) -> bool:
        """Whether the norms before a product give quantised rows; rows of 128-value blocks have no fused operation."""
        return self.weights == "fp8" and self.fused_rms_fp8

    @property
    def norms_multiply(self) -> bool:
        """Whether blocks leave their last product to the norm that follows."""
        return self.norms_quantize and self.fused_mm_rms_fp8

    @property
    def activations_quantize(self) -> bool:
        """Whether SwiGLU gives quantised rows."""
        return self.weights == "fp8" and self.fused_silu_fp8


def decomposed(ops: PlatformOps, field: str) -> Callable[..., Any]:
    """Tier D field `group.name` made of the operations that it decomposes into, whatever the platform has for it."""
    decompose = all_specs()[field].decompose
    assert decompose is not None, f"{field} decomposes into nothing"

    def lookup(part: str) -> Callable[..., Any]:
        group, _, name = part.partition(".")
        found: Callable[..., Any] = getattr(getattr(ops, group), name)
        return found

    return decompose(lookup)
