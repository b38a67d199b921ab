"""Rotary position ops and their meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .norm import rms_norm


@dataclass(frozen=True)
class RopeOps:
    """rotary(q, k, cos, sin) -> (q, k) rotated.
    qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, eps) -> (q, k): each head normalised, then rotated."""

    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    qk_norm_rotary: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, KV, D], cos and sin [T, D / 2]: halves rotated as in Hugging Face's Llama (Su et al., 2021)."""
    cos, sin = cos.to(q.dtype).unsqueeze(1), sin.to(q.dtype).unsqueeze(1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def qk_norm_rotary(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm over the D of each head of q [T, H, D] and k [T, KV, D] with weights [D], then `rotary` (Qwen3)."""
    return rotary(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), cos, sin)


REFERENCE_ROPE_OPS = RopeOps(rotary=rotary, qk_norm_rotary=qk_norm_rotary)
