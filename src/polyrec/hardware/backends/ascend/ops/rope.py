"""Rotations through npu_rotary_mul, with the heads' norms before and the write into the caches after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....ops.rope import Pair, RopeOps, angles, qkv_norm_rotary
from .kv import AscendKV
from .norm import AscendNorm


class AscendRope:
    """library: torch_npu."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._norm = AscendNorm(library)
        self._kv = AscendKV(library)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        """npu_rotary_mul with a gradient: 4 dims (batch, tokens, heads, D), and factors over the whole D, for both halves."""
        r1, r2 = (torch.cat((half, half), dim=-1).to(q.dtype)[None, :, None] for half in (cos, sin))
        return self._rotate(q, r1, r2), self._rotate(k, r1, r2)

    def qk_norm_rotary(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
    ) -> Pair:
        """npu_rms_norm of each head, then `rotary`."""
        return self.rotary(self._norm.rms_norm(q, q_weight, eps), self._norm.rms_norm(k, k_weight, eps), cos, sin)

    def rotary_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Pair:
        """`rotary`, then npu_scatter_pa_kv_cache."""
        q, k = self.rotary(q, k, cos, sin)
        self._kv.write(k, v, key_cache, value_cache, slots)
        return q, k

    def qk_norm_rotary_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Pair:
        """`qk_norm_rotary`, then npu_scatter_pa_kv_cache."""
        q, k = self.qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, eps)
        self._kv.write(k, v, key_cache, value_cache, slots)
        return q, k

    def _rotate(self, x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return self._library.npu_rotary_mul(x[None], r1, r2, rotary_mode="half")[0]


def rope_ops(library: Any) -> RopeOps:
    """All six; angles are torch's."""
    own = AscendRope(library)
    return RopeOps(
        angles=angles,
        rotary=own.rotary,
        qk_norm_rotary=own.qk_norm_rotary,
        qkv_norm_rotary=qkv_norm_rotary,  # in its parts: training asks for it only where it writes its gradient whole
        rotary_store=own.rotary_store,
        qk_norm_rotary_store=own.qk_norm_rotary_store,
    )
