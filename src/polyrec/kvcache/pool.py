"""The pool of prompt keys and values: one row per token and layer, addressed by slot."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]


class KVPool:
    """keys and values: [layers, slots, kv heads, D]. Bytes per token = 2 · kv heads · D · layers · dtype size.

    Made once: recorded kernels know where it lies. It begins with zeros, so that what lies behind a prompt's end, and is read
    with a weight of zero, is a number.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        zeros: Zeros | None = None,
    ) -> None:
        """zeros: a runtime's, which knows how its device is best given much memory."""
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        zeros = zeros or functools.partial(_zeros, device)
        self.keys, self.values = zeros(shape, dtype), zeros(shape, dtype)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values in all layers."""
        num_layers, _, num_kv_heads, head_dim = self.keys.shape
        return 2 * num_layers * num_kv_heads * head_dim * self.keys.element_size()

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [slots, kv heads, D]."""
        return self.keys[layer], self.values[layer]


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
