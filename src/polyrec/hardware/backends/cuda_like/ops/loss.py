"""Cross-entropy in blocks of rows: of the logits, one block exists at a time, and its gradient is written over it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....ops import loss as reference
from ....ops.loss import LossOps
from .launch import kernels, on_accelerator

# Of logits: at 180,000 classes 4,096 rows. Each block reads the weight and adds to its gradient, so few are better: a step of
# the 1.7B shape (16,384 tokens, H200) does 49,705 tokens/s in 38.2 GiB, with half as many rows 49,520 in 37.5, with twice as
# many 49,124 in 39.5.
BLOCK_BYTES = 2 << 30

Gradients = tuple[Tensor | None, Tensor | None]


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`LossOps.linear_cross_entropy`. The backward pass computes each block of logits again."""
    if not runs_blocks(hidden):
        return reference.linear_cross_entropy(hidden, weight, targets)
    if not _has_gradient(hidden, weight):
        return _in_blocks(hidden, weight, targets, None, (False, False))[0]
    losses: Tensor = _CrossEntropy.apply(hidden, weight, targets)
    return losses


def weighted_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`LossOps.weighted_cross_entropy`. The weights are known in the forward pass, so the gradients are made there, from
    logits that are computed once; the backward pass multiplies them by the sum's, unless that is one."""
    if not runs_blocks(hidden):
        return reference.weighted_cross_entropy(hidden, weight, targets, scale)
    if not _has_gradient(hidden, weight):
        losses, _ = _in_blocks(hidden, weight, targets, None, (False, False))
        return (losses * scale).sum(), losses
    total, losses = _WeightedCrossEntropy.apply(hidden, weight, targets, scale)
    return total, losses


def runs_blocks(hidden: Tensor) -> bool:
    """Whether the kernel can read it and has its precision."""
    return on_accelerator(hidden) and hidden.dtype != torch.float64


def block_rows(classes: int, itemsize: int) -> int:
    """Rows of a block: a power of two, so that products meet few shapes."""
    return 1 << max(BLOCK_BYTES // (classes * itemsize), 1).bit_length() - 1


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        return _in_blocks(hidden, weight, targets, None, (False, False))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        scale = gradient.float().contiguous()
        _, gradients = _in_blocks(hidden, weight, targets, scale, ctx.needs_input_grad[:2])
        return *gradients, None


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        losses, gradients = _in_blocks(hidden, weight, targets, scale.float().contiguous(), ctx.needs_input_grad[:2])
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(losses)
        return (losses * scale).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """In place, since the weight's gradient is as large as the weight; a second pass is refused by autograd."""
        parts = ctx.saved_tensors
        for part in parts:
            if part is not None:
                kernels("loss").scale(part, gradient)
                torch.autograd.graph.increment_version(part)  # which autograd does not see a kernel do
        return *parts, None, None


def _in_blocks(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, needed: tuple[bool, bool]
) -> tuple[Tensor, Gradients]:
    """-> losses fp32 [N]; with scale fp32 [N], the needed gradients of Σ scale · loss by hidden and weight."""
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    by_hidden = torch.empty_like(hidden) if needed[0] else None
    by_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if needed[1] else None
    if by_weight is not None and len(hidden) == 0:
        by_weight.zero_()
    each = block_rows(len(weight), hidden.element_size())
    for begin in range(0, len(hidden), each):
        rows = slice(begin, begin + each)
        logits = torch.mm(hidden[rows], weight.t())
        own = None if scale is None else scale[rows]
        kernels("loss").cross_entropy(logits, targets[rows], own, losses[rows])
        if by_hidden is not None:
            torch.mm(logits, weight, out=by_hidden[rows])
        if by_weight is not None:  # the first block writes it: zeros would cost two passes over the vocabulary's weight
            torch.addmm(by_weight, logits.t(), hidden[rows], beta=min(begin, 1), out=by_weight)
        del logits  # before the next block's are allocated
    return losses, (by_hidden, by_weight)


def _has_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def loss_ops() -> LossOps:
    """All fields but `token_logp`, which is made of the first."""
    return replace(
        reference.REFERENCE_LOSS_OPS,
        linear_cross_entropy=linear_cross_entropy,
        weighted_cross_entropy=weighted_cross_entropy,
    )
