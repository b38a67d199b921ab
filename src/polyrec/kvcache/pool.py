"""The pool of prompt keys and values: one row per token and layer, addressed by slot."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


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
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        self.keys, self.values = zeros(shape, dtype, device), zeros(shape, dtype, device)

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


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on the host one whose pages take no memory until they are written, as torch's own would."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
