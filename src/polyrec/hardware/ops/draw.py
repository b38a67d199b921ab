"""Draws the small random inputs on which implementations are compared with their reference."""

from __future__ import annotations

import torch
from torch import Tensor


class Draw:
    """Tensors of one dtype, drawn on the host from one seed. full: more and larger cases than a start-up check has time for."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, *, full: bool = False) -> None:
        self.dtype = dtype
        self.full = full
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal values in the case's dtype."""
        return (torch.randn(shape, generator=self._generator) * scale).to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Values in low…high."""
        return (torch.rand(shape, generator=self._generator) * (high - low) + low).to(dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 values in low…high − 1."""
        return torch.randint(low, high, shape, generator=self._generator)

    def distinct(self, total: int, *shape: int) -> Tensor:
        """int64 values in 0…total − 1, none twice."""
        count = int(torch.tensor(shape).prod())
        return torch.randperm(total, generator=self._generator)[:count].reshape(shape)

    def distinct_floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values far enough apart along the last dim that rounding changes no order."""
        rows = torch.rand(shape, generator=self._generator).argsort(-1)
        return ((rows - shape[-1] / 2) / 8).to(dtype)
