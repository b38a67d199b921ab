"""The settings of a training run, with defaults that were measured best on the bundled data (docs/training.md has the table).

A recipe is saved with every run; the same recipe, seed and data give the same model.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from ..core.config import Settings
from ..data.loader import SamplingConfig
from ..data.prompt import PromptConfig
from .objective import Head

Precision = Literal["auto", "fp32", "bf16"]

# Sizes by name, as fields of a Hugging Face config. The larger ones are the public Qwen3 shapes.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 24},
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
              "num_key_value_heads": 4, "head_dim": 32},
    "base": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 64},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip


class OptimConfig(Settings):
    """AdamW with linear warm-up and cosine decay.

    learning_rate: the peak. final_ratio: last rate over the peak. clip_norm: largest gradient norm.
    ema_decay: the model that is judged and kept is a running average of the weights with this decay (0: the last weights).
    """

    learning_rate: float = Field(5e-3, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    warmup_steps: int = Field(50, ge=0)
    final_ratio: float = Field(0.1, ge=0, le=1)
    clip_norm: float = Field(1.0, gt=0)
    ema_decay: float = Field(0.99, ge=0, lt=1)


class TrainConfig(Settings):
    """One run.

    size: a name of SIZES. model_config_file: a Hugging Face config.json instead (its vocab_size is replaced).
    init_from: a Hugging Face folder to go on from; its tokenizer must be the one `polyrec prepare --tokenizer` extended.
    centroid_init: new SID embeddings start at the codebooks' centroids. head: codes are predicted among their level's
    codes, or among the whole vocabulary. fit_on: what is trained on; with validation events nothing can be chosen on them,
    so `patience` must be 0. steps: fixed, so that runs repeat. eval_every: steps between validations; the last step is
    validated too (0: no validation). Validations run only where their events are not trained on.
    precision: of weights and activations. bf16 keeps every weight's fp32 value too (training/master.py); auto is bf16 on
    accelerators that have it, for models of 100 million parameters or more, else fp32.
    compile: torch.compile of the optimizer's step; auto where the platform's torch generates kernels and the model is that
    large. Layers of large models run through the platform's fused operations with backward passes of their own, where it has
    them; where it has none, and with `on`, one decoder layer is compiled for all of them. checkpoint_activations: so many of
    the first layers keep only their inputs and run again in the backward pass, which saves memory and costs up to a third more
    arithmetic.
    patience: validations without a better NDCG@10 before training stops (0: never). eval_users: at most so many.
    """

    size: str = "tiny"
    model_config_file: str | None = None
    init_from: str | None = None
    centroid_init: bool = True
    initializer_range: float = Field(0.02, gt=0)
    tie_word_embeddings: bool = False
    head: Head = "level"
    prompt: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()
    optim: OptimConfig = OptimConfig()
    precision: Precision = "auto"
    compile: Literal["auto", "off", "on"] = "auto"
    checkpoint_activations: int = Field(0, ge=0)
    fit_on: Literal["fit", "fit+validation"] = "fit"
    steps: int = Field(600, ge=1)
    eval_every: int = Field(100, ge=0)
    patience: int = Field(0, ge=0)
    eval_users: int = Field(1000, ge=1)
    eval_only_new: bool = True
    checkpoint_every: int = Field(100, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    seed: int = Field(0, ge=0, lt=2**31)

    @property
    def validates(self) -> bool:
        """Whether NDCG is measured on the way: not on events that are trained on."""
        return self.eval_every > 0 and self.fit_on == "fit"

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, got '{self.size}'")
        if self.model_config_file and self.init_from:
            raise ValueError("give model_config_file or init_from, not both")
        if self.patience and self.fit_on == "fit+validation":
            raise ValueError("patience needs validation events that are not trained on: set fit_on to 'fit'")
        if self.patience and not self.eval_every:
            raise ValueError("patience needs eval_every")
        return self


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of a step, counted from 0: linear warm-up to the peak, then half a cosine down to final_ratio."""
    from math import cos, pi

    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return config.learning_rate * (config.final_ratio + (1 - config.final_ratio) * 0.5 * (1 + cos(pi * done)))


def size_fields(name: str) -> dict[str, Any]:
    """Config fields of a named size."""
    return dict(SIZES[name])
