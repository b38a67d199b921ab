"""Qwen3 as a recommender's decoder: one model class for training and serving (Qwen team, 2025; layout of Hugging Face's).

Fused QKV and gate_up products, per-head norms on queries and keys, rotary positions, grouped-query attention, and the pair
(hidden, residual) through the stack. What a token may attend to is the plan's business, not the model's.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.config import make_settings
from ..core.errors import CheckpointError
from ..hardware.base.attention import AttentionPlan
from ..hardware.ops import PlatformOps
from ..layers.attention import Attention
from ..layers.choices import LayerChoices
from ..layers.linear import PendingProduct
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryAngles
from .spec import Decoder, DecoderConfig, ModelSpec


class Qwen3Config(DecoderConfig):
    """Sizes beyond those of every decoder, named as in Hugging Face's config.json."""

    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    initializer_range: float = 0.02


def read_config(values: dict[str, Any]) -> Qwen3Config:
    """From a Hugging Face config.json; features this model does not have are refused, never ignored."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    refused = {
        "use_sliding_window": values.get("use_sliding_window", False),
        # `type` is how configs up to 2024 spell it; transformers still reads both.
        "rope type": (rope.get("rope_type") or rope.get("type") or "default") != "default",
        "hidden_act": values.get("hidden_act", "silu") != "silu",
    }
    if any(refused.values()):
        names = ", ".join(name for name, given in refused.items() if given)
        raise CheckpointError(
            "model_feature_missing",
            f"This Qwen3 checkpoint uses features that are not implemented: {names}.",
            "Use a checkpoint without them.",
        )
    fields = {name: values[name] for name in Qwen3Config.model_fields if values.get(name) is not None}
    fields.setdefault("tie_word_embeddings", False)  # as transformers takes a Qwen3 config that does not say
    if "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    if "head_dim" not in fields and {"hidden_size", "num_attention_heads"} <= fields.keys():
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    return make_settings(Qwen3Config, fields, "config.json")


def write_config(config: Qwen3Config) -> dict[str, Any]:
    """To a Hugging Face config.json (both spellings of the rotary base, for transformers 4 and 5)."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        **config.model_dump(),
    }


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind the norm that also adds to the residual stream."""

    def __init__(self, config: Qwen3Config, layer: int, ops: PlatformOps, choices: LayerChoices) -> None:
        super().__init__()
        norm = functools.partial(
            RMSNorm,
            config.hidden_size,
            config.rms_norm_eps,
            ops.norm,
            quantized=choices.norms_quantize,
            dtype=choices.dtype,
        )
        self.input_layernorm = norm()
        self.self_attn = Attention(
            layer,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            eps=config.rms_norm_eps,
            bias=config.attention_bias,
            ops=ops,
            choices=choices,
        )
        self.post_attention_layernorm = norm()
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, ops=ops, choices=choices)

    def forward(
        self,
        hidden: Tensor | PendingProduct,
        residual: Tensor | None,
        angles: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        rows: Tensor | None = None,
        rows_plan: AttentionPlan | None = None,
    ) -> tuple[Tensor | PendingProduct, Tensor]:
        """rows: int64 [R], those that go on after attention; None: all. rows_plan: as in `Attention`."""
        normed, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(normed, angles, plan, rows, rows_plan)
        if rows is not None:
            residual = residual.index_select(0, rows)
        normed, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(normed), residual

    def forward_fused(
        self, hidden: Tensor, residual: Tensor | None, angles: tuple[Tensor, Tensor], plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """`forward` for training, through operations that keep neither normed rows nor activations for the backward pass, and
        that join no gradients there."""
        product, residual = self.input_layernorm.project(hidden, residual, self.self_attn.qkv_proj)
        hidden = self.self_attn.o_proj(self.self_attn.mix_whole(product, angles, plan))
        product, residual = self.post_attention_layernorm.project(hidden, residual, self.mlp.gate_up_proj)
        return self.mlp.project(product), residual


class Qwen3(Decoder):
    """Token ids -> last hidden states; `head_weight` turns those into logits (tied to the embedding or not)."""

    def __init__(self, config: Qwen3Config, ops: PlatformOps, choices: LayerChoices | None = None) -> None:
        super().__init__()
        choices = choices or LayerChoices()
        size, dtype = config.hidden_size, choices.dtype
        self.config: Qwen3Config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, size, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, ops, choices) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps, ops.norm, dtype=dtype)
        self.rotary = RotaryAngles(config.head_dim, config.rope_theta, ops.rope)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(size, config.vocab_size, bias=False, dtype=dtype)

    @property
    def head_weight(self) -> Tensor:
        """[V, D]."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def takes_quantized_attention(self) -> bool:
        return cast(DecoderLayer, self.layers[-1]).self_attn.takes_quantized

    @property
    def after_attention(self) -> tuple[nn.Module, ...]:
        """What follows the last layer's attention."""
        last = cast(DecoderLayer, self.layers[-1])
        return last.self_attn.o_proj, last.post_attention_layernorm, last.mlp, self.norm

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        rows: Tensor | None = None,
        rows_plan: AttentionPlan | None = None,
        embedded: Tensor | None = None,
    ) -> Tensor:
        """token_ids and positions int64 [T], packed -> normed hidden states [T, D]; of `rows`, int64 [R], [R, D].

        embedded: the tokens' rows of the embedding, if `embed` was asked for them.
        """
        angles = self.rotary(positions)
        hidden, residual = self.embed_tokens(token_ids) if embedded is None else embedded, None
        *others, last = self.layers
        for layer in others:
            hidden, residual = layer(hidden, residual, angles, plan)
        # Without rows the last layer is called as the others are, so that one compiled or fused function serves all.
        hidden, residual = last(hidden, residual, angles, plan, *(() if rows is None else (rows, rows_plan)))
        return self.norm(hidden, residual)[0]

    def init_weights(self, generator: torch.Generator) -> None:
        """Normal weights of the config's spread; norms one, biases zero."""
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=self.config.initializer_range, generator=generator)
            else:
                nn.init.constant_(weight, 0.0 if name.endswith("bias") else 1.0)


SPEC = ModelSpec(
    build=Qwen3,
    read_config=read_config,
    write_config=write_config,
    merged={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
)
