"""The embedding in training, where the head may have the same weight: two gradients become one in the place of the larger."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def embed_tied(weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """weight [V, D], token_ids int64 [T] -> (their rows [T, D]; the weight as the head takes it, [V, D] in the same memory).

    Autograd alone fills a gradient of [V, D] with zeros for the T rows and then adds both gradients: of bf16, 8 bytes a number
    of the vocabulary beside the head's own gradient. Here the rows are added where the head's gradient stands, with the same
    roundings. That tensor is written, so what takes the head's weight must give a gradient of its own, as products, slices
    and losses do, and a hook that keeps it keeps what it becomes. There is no second derivative.
    """
    # A batch as long as the vocabulary has nothing to save.
    if not (torch.is_grad_enabled() and weight.requires_grad) or len(token_ids) >= len(weight):
        return torch.nn.functional.embedding(token_ids, weight), weight
    rows, same = _EmbedTied.apply(weight, token_ids)
    return rows, same


class _EmbedTied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(token_ids)
        ctx.num_rows = len(weight)
        ctx.set_materialize_grads(False)
        return torch.nn.functional.embedding(token_ids, weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_rows: Tensor | None, by_weight: Tensor | None) -> tuple[Tensor | None, None]:
        (token_ids,) = ctx.saved_tensors
        if by_rows is None:
            return by_weight, None
        if by_weight is None:
            return _sum_rows(by_rows, token_ids, ctx.num_rows), None
        places, sums = sum_repeated(token_ids, by_rows, ctx.num_rows)
        # A gradient that was expanded, so that places share numbers, is copied here.
        return by_weight.contiguous().index_add_(0, places, sums), None


def sum_repeated(token_ids: Tensor, rows: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """token_ids int64 [T] below num_tokens, which is more than T; rows [T, D] -> (places int64 [T], sums [T, D]).

    One of a token's places holds the sum of its rows, all others zeros. So adding the sums at their places gives the same in
    any order, atomically or not, and nobody waits for the device to count the tokens. Zeros go each to a place of its own:
    thousands at one would queue there.
    """
    each = torch.arange(len(token_ids), device=token_ids.device)
    holder = torch.empty(num_tokens, dtype=torch.int64, device=token_ids.device)
    holder[token_ids] = each  # of equal tokens any one, whose number then stands for all
    holder = holder[token_ids]
    return torch.where(holder == each, token_ids, each), _sum_rows(rows, holder, len(token_ids))


def _sum_rows(rows: Tensor, places: Tensor, num_places: int) -> Tensor:
    """The embedding's gradient, [num_places, D]: on CUDA-like devices sums in fp32, always in the same order."""
    summed: Tensor = torch.ops.aten.embedding_dense_backward(rows, places, num_places, -1, False)
    return summed
