"""Mixture-of-experts ops and their meaning: which experts a token goes to, its rows in experts' order, and the experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .act import silu_and_mul
from .draw import Draw
from .spec import Case, Lookup, at_least_fp32, op, op_claims, reference_group


def route(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """router_logits [T, E] -> (weights fp32 [T, k], experts int64 [T, k]): the top_k of the softmax over all experts in
    fp32, best first, of equals the lower expert; renormalize: a token's weights add up to 1 (Qwen3-MoE, Mixtral)."""
    probability = at_least_fp32(router_logits).softmax(-1)
    weights, experts = probability.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k].clone()
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights.clone(), experts


def permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copies each token once for each of its experts, in experts' order; within an expert, tokens stay in order.

    x [T, D], experts int64 [T, k] -> (rows [T · k, D], order int64 [T · k], group_sizes int64 [E]); order: a row's place in
    experts.flatten().
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    group_sizes = (flat == torch.arange(num_experts, device=flat.device)[:, None]).sum(-1)
    return x[order // experts.shape[1]], order, group_sizes


@op_claims(graph_safe=False)  # how many tokens an expert gets decides shapes
def experts(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Σ over a token's experts of weight · down(silu(gate) · up), summed in fp32.

    x [T, D], weights fp32 [T, k], experts int64 [T, k], gate_up [E, 2 I, D], down [E, D, I] -> [T, D].
    """
    total = torch.zeros_like(x, dtype=weights.dtype)
    for expert in range(len(gate_up)):
        token, place = torch.where(experts == expert)
        hidden = silu_and_mul(torch.nn.functional.linear(x[token], gate_up[expert]))
        out = torch.nn.functional.linear(hidden, down[expert]).to(weights.dtype)
        total = total.index_add(0, token, out * weights[token, place, None])
    return total.to(x.dtype)


def _route_cases(draw: Draw) -> Iterator[Case]:
    for rows, size, top_k in ((3, 8, 2), (17, 64, 6))[: 2 if draw.full else 1]:
        logits = draw.distinct_floats(rows, size, dtype=draw.dtype)
        yield {"router_logits": logits, "top_k": top_k, "renormalize": True}
        if draw.full:
            yield {"router_logits": logits, "top_k": top_k, "renormalize": False}


def _chosen(draw: Draw, rows: int, num_experts: int, top_k: int) -> Tensor:
    """int64 [rows, top_k], distinct within a row."""
    return draw.distinct_floats(rows, num_experts).argsort(-1)[:, :top_k].contiguous()


def _permute_cases(draw: Draw) -> Iterator[Case]:
    for rows, num_experts, top_k in ((3, 8, 2), (17, 4, 3))[: 2 if draw.full else 1]:
        yield {
            "x": draw.normal(rows, 16),
            "experts": _chosen(draw, rows, num_experts, top_k),
            "num_experts": num_experts,
        }


def _experts_cases(draw: Draw) -> Iterator[Case]:
    for rows, num_experts, top_k, dim, inner in ((3, 4, 2, 16, 16), (17, 8, 3, 64, 32))[: 2 if draw.full else 1]:
        yield {
            "x": draw.normal(rows, dim),
            "weights": draw.uniform(rows, top_k, low=0.1, high=0.5, dtype=torch.float32),
            "experts": _chosen(draw, rows, num_experts, top_k),
            "gate_up": draw.normal(num_experts, 2 * inner, dim, scale=dim**-0.5),
            "down": draw.normal(num_experts, dim, inner, scale=inner**-0.5),
        }


def _decompose_experts(op: Lookup) -> Callable[..., Tensor]:
    permute, grouped_mm, silu_and_mul = op("moe.permute"), op("linear.grouped_mm"), op("act.silu_and_mul")

    def permute_then_multiply(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        rows, order, group_sizes = permute(x, experts, len(gate_up))
        out = grouped_mm(silu_and_mul(grouped_mm(rows, gate_up, group_sizes)), down, group_sizes)
        weighted = out.to(weights.dtype) * weights.flatten()[order, None]
        unsorted = torch.zeros_like(weighted).index_copy(0, order, weighted)
        return unsorted.unflatten(0, experts.shape).sum(1).to(x.dtype)

    return permute_then_multiply


@dataclass(frozen=True)
class MoeOps:
    """Routing and experts; optional, since only mixture-of-experts models need them."""

    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]] = field(
        metadata=op(route, "router_logits [T, E] -> fp32 [T, k], int64 [T, k]", _route_cases, tier="X")
    )
    permute: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]] = field(
        metadata=op(
            permute,
            "x [T, D], experts int64 [T, k] -> rows [T · k, D], order int64 [T · k], group_sizes int64 [E]",
            _permute_cases,
            tier="X",
        )
    )
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = field(
        metadata=op(
            experts,
            "x [T, D], weights fp32 [T, k], experts int64 [T, k], gate_up [E, 2 I, D], down [E, D, I] -> [T, D]",
            _experts_cases,
            tier="D",
            needs=("moe.permute", "linear.grouped_mm", "act.silu_and_mul"),
            decompose=_decompose_experts,
            rounds_inside=True,
        )
    )


REFERENCE_MOE_OPS = reference_group(MoeOps)
