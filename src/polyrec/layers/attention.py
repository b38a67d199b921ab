"""The attention block: one QKV product, per-head norms and rotation, the batch's plan, the output product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..hardware.base.attention import AttentionPlan
from ..hardware.ops import PlatformOps
from .choices import LayerChoices, decomposed
from .linear import QuantizedRows, make_linear


class Attention(nn.Module):
    """x [T, D], or its quantised rows -> [T, D]: grouped-query attention with normalised queries and keys (Qwen3).

    layer: its number, which the plan asks for. In `forward`, angles: cos and sin fp32 [T, head_dim / 2]; rows: int64 [R],
    those of attention's result that go through the output product -> [R, D]; None: all.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        eps: float,
        bias: bool,
        ops: PlatformOps,
        choices: LayerChoices | None = None,
    ) -> None:
        super().__init__()
        choices = choices or LayerChoices()
        self.layer = layer
        self.head_dim = head_dim
        self.eps = eps
        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.qkv_proj = make_linear(hidden_size, sizes, bias=bias, ops=ops.linear, choices=choices)
        self.q_norm = HeadNorm(head_dim, choices.dtype)
        self.k_norm = HeadNorm(head_dim, choices.dtype)
        self.o_proj = make_linear(sizes[0], (hidden_size,), bias=bias, ops=ops.linear, choices=choices)
        fused = choices.fused_qk_rope_kv
        self._qk_norm_rotary = ops.rope.qk_norm_rotary if fused else decomposed(ops, "rope.qk_norm_rotary")
        self._qk_norm_rotary_store = (
            ops.rope.qk_norm_rotary_store if fused else decomposed(ops, "rope.qk_norm_rotary_store")
        )

    def forward(
        self,
        x: Tensor | QuantizedRows,
        angles: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        rows: Tensor | None = None,
    ) -> Tensor:
        mixed = self.mix(self.qkv_proj(x), angles, plan)
        return self.o_proj(mixed if rows is None else mixed.index_select(0, rows))

    def mix(self, product: Tensor, angles: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        """What stands between the two products: norms, rotation and the plan. product [T, query | key | value] -> [T, ...]."""
        parts = product.split(self.qkv_proj.parts, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        norms, target = (self.q_norm.weight, self.k_norm.weight), plan.target(self.layer)
        if target is None:
            query, key = self._qk_norm_rotary(query, key, *norms, *angles, self.eps)
            return plan.run(self.layer, query, key, value)
        query, key = self._qk_norm_rotary_store(query, key, value, *norms, *angles, self.eps, *target)
        return plan.run_written(self.layer, query, key, value)


class HeadNorm(nn.Module):
    """The weight of a per-head norm; the fused op applies it."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
