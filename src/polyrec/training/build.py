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
from ..models.checkpoint import build_model, load_weights, read_config
from ..models.extend import extend_checkpoint
from ..models.registry import model_spec
from ..models.spec import Decoder, ModelSpec
from ..sid.layout import SidLayout
from ..sid.quantizer import Codebooks
from ..sid.tokenizer import load_tokenizer, num_tokens
from .recipe import TrainConfig, size_fields


def start_model(
    config: TrainConfig,
    num_vocab: int,
    layout: SidLayout,
    codebooks: Codebooks,
    max_tokens: int,
    backend: HardwareBackend,
) -> tuple[Decoder, ModelSpec]:
    """num_vocab: tokens of the prepared tokenizer. max_tokens: longest prompt and SID, which the positions must hold."""
    if config.init_from:
        return _extended(Path(config.init_from), config, num_vocab, max_tokens, backend)
    values = _fresh_config(config, num_vocab, max_tokens)
    spec = model_spec(values, config.model_config_file or f"size '{config.size}'")
    model = build_model(spec, values, backend)
    model.init_weights(torch.Generator().manual_seed(config.seed))
    if config.centroid_init:
        centroid_embeddings(model.embed_tokens.weight, layout, codebooks, values["initializer_range"])
    return model.train(), spec


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
        values = read_json(config.model_config_file)
    else:
        values = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 4096, **size_fields(config.size)}
        values["tie_word_embeddings"] = config.tie_word_embeddings
        values["initializer_range"] = config.initializer_range
    values["vocab_size"] = padded_vocab_size(num_vocab)
    values.setdefault("initializer_range", config.initializer_range)
    _check_positions(values, max_tokens)
    return values


def _check_positions(values: dict[str, Any], max_tokens: int) -> None:
    if values.get("max_position_embeddings", max_tokens) < max_tokens:
        raise CheckpointError(
            "positions_too_few",
            f"The config holds {values['max_position_embeddings']} positions, prompts need {max_tokens}.",
            "Raise max_position_embeddings, or lower prompt.max_items.",
        )


def _extended(
    source: Path, config: TrainConfig, num_vocab: int, max_tokens: int, backend: HardwareBackend
) -> tuple[Decoder, ModelSpec]:
    """The source checkpoint with rows for the SID tokens that `prepare --tokenizer` appended to its tokenizer."""
    first_new = num_tokens(load_tokenizer(source))
    if num_vocab <= first_new:
        raise CheckpointError(
            "tokenizer_not_extended",
            f"The prepared tokenizer has {num_vocab} tokens, {source} has {first_new} already.",
            f"Prepare the data with --tokenizer {source}.",
        )
    _check_positions(read_config(source), max_tokens)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "extended"
        extend_checkpoint(source, folder, num_vocab, seed=config.seed, first_new=first_new)
        values = read_config(folder)
        spec = model_spec(values, str(source / "config.json"))
        model = build_model(spec, values, backend)
        load_weights(model, spec, folder)
    return model.train(), spec
