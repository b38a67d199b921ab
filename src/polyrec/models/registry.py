"""From the `architectures` of a config.json to the model's spec; a model's file is imported when first asked for."""

from __future__ import annotations

from typing import Any

from ..core.errors import CheckpointError
from ..core.registry import Registry
from .spec import ModelSpec

_MODELS = Registry("model")
_MODELS.register("Qwen3ForCausalLM", "polyrec.models.qwen3:SPEC")


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """The spec for a Hugging Face config."""
    names = config.get("architectures") or []
    if len(names) != 1:
        raise CheckpointError(
            "architecture_missing",
            f"{where} names {len(names)} architectures, one is needed.",
            'Add "architectures": ["Qwen3ForCausalLM"] or the one that fits.',
        )
    return _MODELS.load(names[0])
