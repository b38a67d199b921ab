"""What a model tells the rest: how to build it, read and write its config, and which weights are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.config import Settings
from ..hardware.base.attention import AttentionPlan
from ..hardware.ops import PlatformOps


class DecoderConfig(Protocol):
    """The sizes every layer above the model asks for."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int


class Decoder(Protocol):
    """A model as the engine and the trainer see it (an nn.Module)."""

    config: Any

    @property
    def head_weight(self) -> Tensor:
        """[V, D]."""
        ...

    def __call__(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """int64 [T], int64 [T] -> normed hidden states [T, D]."""
        ...

    def init_weights(self, generator: torch.Generator) -> None:
        """Draws fresh weights."""
        ...


@dataclass(frozen=True)
class ModelSpec:
    """merged: our merged projection -> Hugging Face's projections in the order they are concatenated."""

    architecture: str
    build: Callable[[Any, PlatformOps], torch.nn.Module]
    read_config: Callable[[dict[str, Any]], Settings]
    write_config: Callable[[Any], dict[str, Any]]
    merged: Mapping[str, tuple[str, ...]]
