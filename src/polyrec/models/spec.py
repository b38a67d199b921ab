"""What a model tells the rest: how to build it, read and write its config, and which weights are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.config import Settings
from ..hardware.base.attention import AttentionNeeds, AttentionPlan
from ..hardware.ops import PlatformOps
from ..layers.choices import LayerChoices
from ..layers.embedding import embed_tied


class DecoderConfig(Settings):
    """The sizes every layer above the model asks for."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int


class Decoder(nn.Module):
    """A model as the engine and the trainer see it.

    Its `layers` have `forward`, and `forward_fused` with the same results and, but for rows, arguments: the form that large
    models are trained in, whose operations keep less for the backward pass.
    """

    config: DecoderConfig
    embed_tokens: nn.Embedding

    @property
    def head_weight(self) -> Tensor:
        """[V, D]."""
        raise NotImplementedError

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """For training: token_ids int64 [T] -> (`embedded` for `forward`, [T, D]; the head's weight for the loss, [V, D]).

        Of a tied weight autograd then sees one use, and its two gradients need no pass over the vocabulary to be one.
        """
        weight, head = self.embed_tokens.weight, self.head_weight
        return embed_tied(weight, token_ids) if head is weight else (self.embed_tokens(token_ids), head)

    def attention_needs(self, dtype: torch.dtype, *, train: bool = False) -> AttentionNeeds:
        """What the model asks of attention. dtype: of queries, keys and values. train: gradients are taken.

        A model with windows, soft caps or latent keys says so here.
        """
        config = self.config
        return AttentionNeeds(
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            train=train,
            quantized=self.takes_quantized_attention,
        )

    @property
    def takes_quantized_attention(self) -> bool:
        """Whether attention's results go into products of e4m3 with a scale a row."""
        return False

    @property
    def after_attention(self) -> tuple[nn.Module, ...]:
        """What follows the last layer's attention: `forward` runs it for the rows that are asked for."""
        raise NotImplementedError

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        rows: Tensor | None = None,
        rows_plan: AttentionPlan | None = None,
        embedded: Tensor | None = None,
    ) -> Tensor:
        """token_ids and positions int64 [T], packed -> normed hidden states [T, D]; of `rows`, [R, D].

        rows: int64 [R] on the device, any of them as often as one likes; not while layers are trained in another form. All
        tokens' keys and values reach the plan, and what follows the last layer's attention is computed for these rows alone.
        rows_plan: of these rows, by which they attend in the last layer, where the plan keeps keys and values; None: all rows
        attend there. embedded: what `embed` gave for these tokens, [T, D]; None: it is looked up here.
        """
        raise NotImplementedError

    def init_weights(self, generator: torch.Generator) -> None:
        """Draws fresh weights."""
        raise NotImplementedError


@dataclass(frozen=True)
class ModelSpec:
    """build: config, operations, what is settled for the layers -> the model, its weights not yet filled.

    merged: our merged projection -> Hugging Face's projections in the order they are concatenated.
    """

    build: Callable[[Any, PlatformOps, LayerChoices], Decoder]
    read_config: Callable[[dict[str, Any]], DecoderConfig]
    write_config: Callable[[Any], dict[str, Any]]
    merged: Mapping[str, tuple[str, ...]]
