"""The attention block: one QKV product, per-head norms and rotation, the batch's plan, the output product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..hardware.base.attention import AttentionPlan, HeadRotation, WriteTarget
from ..hardware.ops import PlatformOps
from ..hardware.ops.linear import QuantizedRows
from .choices import LayerChoices, decomposed
from .linear import Fp8Linear, PendingProduct, make_linear


class Attention(nn.Module):
    """x [T, D], or its quantised rows -> [T, D], for an `RMSNorm`: grouped-query attention with normalised queries and keys
    (Qwen3).

    layer: its number, which the plan asks for. In `forward`, angles: cos and sin fp32 [T, head_dim / 2]; rows: int64 [R],
    those that go through the output product -> [R, D]; None: all. rows_plan: by which these rows attend, to keys and values
    that are kept by then; None, or where the plan names no target for them: all rows attend.
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
        self.o_proj = make_linear(
            sizes[0], (hidden_size,), bias=bias, ops=ops.linear, choices=choices, before_norm=True
        )
        fused = choices.fused_qk_rope_kv
        self._qk_norm_rotary = ops.rope.qk_norm_rotary if fused else decomposed(ops, "rope.qk_norm_rotary")
        self._qk_norm_rotary_store = (
            ops.rope.qk_norm_rotary_store if fused else decomposed(ops, "rope.qk_norm_rotary_store")
        )
        self._qkv_norm_rotary = ops.rope.qkv_norm_rotary
        self._plans_rotate = choices.plans_rotate

    def forward(
        self,
        x: Tensor | QuantizedRows,
        angles: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        rows: Tensor | None = None,
        rows_plan: AttentionPlan | None = None,
    ) -> Tensor | PendingProduct:
        product = self.qkv_proj(x)
        if rows is None:
            return self.o_proj(self.mix(product, angles, plan))
        target = plan.target(self.layer)
        if rows_plan is None or target is None:
            return self.o_proj(rows_of(self.mix(product, angles, plan), rows))
        parts = (part.index_select(0, rows) for part in self._rotated(product, angles, target))
        return self.o_proj(rows_plan.run_written(self.layer, *parts))

    @property
    def takes_quantized(self) -> bool:
        """Whether plans may give quantised results."""
        return isinstance(self.o_proj, Fp8Linear)

    def mix(self, product: Tensor, angles: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor | QuantizedRows:
        """What stands between the two products: norms, rotation and the plan. product [T, query | key | value] -> [T, ...]."""
        if self._plans_rotate and plan.rotates:
            rotation = HeadRotation(self.q_norm.weight, self.k_norm.weight, *angles, self.eps)
            return plan.run_product(self.layer, *self._split(product), rotation)
        target = plan.target(self.layer)
        query, key, value = self._rotated(product, angles, target)
        run = plan.run if target is None else plan.run_written
        return run(self.layer, query, key, value)

    def mix_whole(self, product: Tensor, angles: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor | QuantizedRows:
        """For training: `mix` where nothing is kept, through the operation whose product's gradient comes in one piece."""
        assert plan.target(self.layer) is None, "what is kept has no gradient"
        norms, kv_heads = (self.q_norm.weight, self.k_norm.weight), self.qkv_proj.parts[1] // self.head_dim
        return plan.run(self.layer, *self._qkv_norm_rotary(product, *norms, *angles, self.eps, kv_heads))

    def _rotated(
        self, product: Tensor, angles: tuple[Tensor, Tensor], target: WriteTarget | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, D] and keys, normalised and rotated, and values [T, kv heads, D]; the latter two in `target`."""
        query, key, value = self._split(product)
        norms = self.q_norm.weight, self.k_norm.weight
        if target is None:
            return *self._qk_norm_rotary(query, key, *norms, *angles, self.eps), value
        return *self._qk_norm_rotary_store(query, key, value, *norms, *angles, self.eps, *target), value

    def _split(self, product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, D], keys and values [T, kv heads, D], where they are."""
        query, key, value = product.split(self.qkv_proj.parts, dim=-1)
        sizes = (-1, self.head_dim)
        return query.unflatten(-1, sizes), key.unflatten(-1, sizes), value.unflatten(-1, sizes)


def rows_of(mixed: Tensor | QuantizedRows, rows: Tensor) -> Tensor | QuantizedRows:
    """Some rows, int64 [R], of attention's result."""
    if isinstance(mixed, QuantizedRows):
        return QuantizedRows(*(part.index_select(0, rows) for part in mixed))
    return mixed.index_select(0, rows)


class HeadNorm(nn.Module):
    """The weight of a per-head norm; the fused op applies it."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
