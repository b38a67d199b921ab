"""The pool of prompt keys and values: one row per token and layer, addressed by slot."""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """keys and values: [layers, slots, kv heads, D]. Bytes per token = 2 · kv heads · D · layers · dtype size.

    A batch uses slots 0…T−1 and is done before the next one starts; the pool grows when a batch needs more.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = (num_layers, num_slots, num_kv_heads, head_dim)
        self.keys = torch.zeros(self._shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    @property
    def num_slots(self) -> int:
        return self._shape[1]

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values in all layers."""
        num_layers, _, num_kv_heads, head_dim = self._shape
        return 2 * num_layers * num_kv_heads * head_dim * self.keys.element_size()

    def reserve(self, num_tokens: int) -> None:
        """Makes room for a batch of `num_tokens`; what the pool held before is gone."""
        if num_tokens > self.num_slots:
            self._shape = (self._shape[0], num_tokens, *self._shape[2:])
            self.keys = self.keys.new_zeros(self._shape)
            self.values = torch.zeros_like(self.keys)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [slots, kv heads, D]."""
        return self.keys[layer], self.values[layer]
