"""Mixtures of experts: torch routes and sorts, npu_grouped_matmul and npu_swiglu compute.

torch_npu also routes (npu_moe_gating_top_k_softmax) and sorts (npu_moe_init_routing_v2), but does not say which expert wins a
tie, nor that tokens of one expert stay in order, as our contract does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....ops.moe import MoeOps, permute, route
from ....ops.spec import op_claims
from .act import AscendAct
from .linear import AscendLinear


class AscendMoe:
    """library: torch_npu."""

    def __init__(self, library: Any) -> None:
        self._act = AscendAct(library)
        self._linear = AscendLinear(library)

    @op_claims(train=False)
    def experts(self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """All experts' products at once, on rows sorted by expert; the weighted sum in fp32."""
        rows, order, group_sizes = permute(x, experts, len(gate_up))
        hidden = self._act.silu_and_mul(self._linear.grouped_mm(rows, gate_up, group_sizes))
        out = self._linear.grouped_mm(hidden, down, group_sizes)
        weighted = out.to(weights.dtype) * weights.flatten()[order, None]
        by_token = torch.empty_like(weighted).index_copy_(0, order, weighted).unflatten(0, experts.shape)
        return by_token.sum(1).to(x.dtype)


def moe_ops(library: Any) -> MoeOps:
    return MoeOps(route=route, permute=permute, experts=AscendMoe(library).experts)
