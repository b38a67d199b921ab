"""The model a run starts from: fresh in a named size or a given config, or a Hugging Face checkpoint with SID rows added."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.errors import CheckpointError
from ..core.files import read_json
from ..core.vocabulary import padded_vocab_size
from ..hardware.base.backend import HardwareBackend
from ..models.checkpoint import build_model, check_dtype, load_weights, read_config
from ..models.extend import extend_checkpoint
from ..models.registry import model_spec
from ..models.spec import Decoder, ModelSpec
from ..sid.layout import SidLayout
from ..sid.quantizer import Codebooks
from ..sid.tokenizer import load_tokenizer, num_tokens
from .accelerate import num_parameters, weights_dtype
from .recipe import TrainConfig, size_fields


def start_model(
    config: TrainConfig,
    num_vocab: int,
    layout: SidLayout,
    codebooks: Codebooks,
    max_tokens: int,
    backend: HardwareBackend,
) -> tuple[Decoder, ModelSpec]:
    """num_vocab: tokens of the prepared tokenizer. max_tokens: longest prompt and SID, which the positions must hold.

    Weights are drawn, or read, in fp32 on the device, and then get the recipe's precision.
    """
    if config.init_from:
        model, spec = _extended(Path(config.init_from), config, num_vocab, layout, max_tokens, backend)
    else:
        model, spec = _fresh(config, num_vocab, layout, codebooks, max_tokens, backend)
    dtype = weights_dtype(config.precision, num_parameters(model), backend)
    check_dtype(dtype, backend)
    return model.to(dtype).train(), spec


def _fresh(
    config: TrainConfig,
    num_vocab: int,
    layout: SidLayout,
    codebooks: Codebooks,
    max_tokens: int,
    backend: HardwareBackend,
) -> tuple[Decoder, ModelSpec]:
    values = _fresh_config(config, num_vocab, max_tokens)
    model, spec = _build(values, config.model_config_file or f"size '{config.size}'", max_tokens, backend)
    model.init_weights(torch.Generator(device=backend.runtime.device).manual_seed(config.seed))
    if config.centroid_init:
        centroid_embeddings(model.embed_tokens.weight, layout, codebooks, values["initializer_range"])
    return model, spec


def centroid_embeddings(weight: torch.Tensor, layout: SidLayout, codebooks: Codebooks, spread: float) -> None:
    """Sets the rows of the codes to their centroids, turned into the hidden size by a fixed random rotation, at the
    standard deviation `spread`: codes that are near in the item space start near."""
    hidden = weight.shape[1]
    dim = codebooks.centroids[0].shape[1]
    side = max(hidden, dim)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((side, side)))[0][:dim, :hidden]
    with torch.no_grad():
        for start, centroids in zip(layout.level_starts, codebooks.centroids, strict=True):
            rows = centroids @ rotation
            scale = spread / max(float(np.sqrt(np.square(rows).mean())), 1e-12)
            weight[start : start + len(rows)] = torch.from_numpy(rows * scale).to(weight.dtype)


def _fresh_config(config: TrainConfig, num_vocab: int, max_tokens: int) -> dict[str, Any]:
    if config.model_config_file:
        values = _read_sizes(Path(config.model_config_file))
    else:
        values = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 4096, **size_fields(config.size)}
    values["vocab_size"] = padded_vocab_size(num_vocab)
    # What a config file does not say, the recipe does.
    values.setdefault("tie_word_embeddings", config.tie_word_embeddings)
    values.setdefault("initializer_range", config.initializer_range)
    return values


def _read_sizes(path: Path) -> dict[str, Any]:
    values = read_json(path) if path.is_file() else None
    if not isinstance(values, dict):
        raise CheckpointError(
            "model_config_missing",
            f"{path} {'holds no config' if path.is_file() else 'is no file'}.",
            "Name a Hugging Face config.json.",
        )
    return values


def _build(values: dict[str, Any], where: str, max_tokens: int, backend: HardwareBackend) -> tuple[Decoder, ModelSpec]:
    """The uninitialised model, after a look at its positions: a config that does not say how many has its model's default."""
    spec = model_spec(values, where)
    positions = spec.read_config(values).max_position_embeddings
    if positions < max_tokens:
        raise CheckpointError(
            "positions_too_few",
            f"{where} holds {positions} positions, prompts need {max_tokens}.",
            "Raise max_position_embeddings, or lower prompt.max_items.",
        )
    return build_model(spec, values, backend), spec


def _extended(
    source: Path, config: TrainConfig, num_vocab: int, layout: SidLayout, max_tokens: int, backend: HardwareBackend
) -> tuple[Decoder, ModelSpec]:
    """The source checkpoint with rows for the SID tokens that `prepare --tokenizer` appended to its tokenizer."""
    first_new = num_tokens(load_tokenizer(source))
    # A new tokenizer may well have more tokens than the source's; but then its SID tokens stand where the source has others.
    if layout.level_starts[0] < first_new:
        raise CheckpointError(
            "tokenizer_not_extended",
            f"The prepared tokenizer's SIDs start at token {layout.level_starts[0]}, {source} has {first_new} tokens already.",
            f"Prepare the data with --tokenizer {source}.",
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "extended"
        extend_checkpoint(source, folder, num_vocab, seed=config.seed, first_new=first_new)
        model, spec = _build(read_config(folder), str(source / "config.json"), max_tokens, backend)
        load_weights(model, spec, folder)
    return model, spec
