"""A whole model folder of random weights in a second: for tests of servers, files and tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ..core.vocabulary import padded_vocab_size
from ..data.prompt import PromptConfig
from ..engine.folder import CATALOG, write_facts
from ..hardware.ops import REFERENCE_OPS
from ..models.checkpoint import save_model
from ..models.qwen3 import SPEC, Qwen3, Qwen3Config
from ..sid.catalog import Catalog
from ..sid.tokenizer import build_tokenizer, layout_of, num_tokens, save_tokenizer


def write_tiny_model(
    folder: str | Path,
    num_items: int = 200,
    seed: int = 0,
    codebook_sizes: tuple[int, ...] = (16, 16, 16),
    hidden_size: int = 32,
    num_layers: int = 2,
) -> Path:
    """Writes a folder as `polyrec train` does. Items are named item-0…, with random distinct SIDs and counts."""
    folder = Path(folder)
    rng = np.random.default_rng(seed)
    picked = rng.choice(int(np.prod(codebook_sizes)), size=num_items, replace=False)
    codes = np.stack(np.unravel_index(picked, codebook_sizes), axis=1).astype(np.int32)
    tokenizer = build_tokenizer(codebook_sizes)
    config = Qwen3Config(
        vocab_size=padded_vocab_size(num_tokens(tokenizer)),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        initializer_range=0.3,
    )
    model = Qwen3(config, REFERENCE_OPS)  # it is only written, so no hardware is chosen
    model.init_weights(torch.Generator().manual_seed(seed))
    save_model(model, SPEC, folder)
    save_tokenizer(tokenizer, folder)
    Catalog(
        [f"item-{row}" for row in range(num_items)],
        codes,
        [f"Item number {row}" for row in range(num_items)],
        rng.integers(0, 1000, num_items),
    ).save(folder / CATALOG)
    fingerprint = Catalog.fingerprint(codebook_sizes, "random")
    write_facts(folder, layout_of(tokenizer), PromptConfig(), "basket", fingerprint, {})
    return folder
