"""A model folder of random weights in a named shape, with a catalog of random SIDs: what speed is measured on.

Weights are drawn on the backend's device and written one tensor at a time, so a model of any size needs the memory of its
largest tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..core.errors import ConfigError, closest
from ..core.files import atomic_path, write_json
from ..core.vocabulary import padded_vocab_size
from ..data.prompt import PromptConfig
from ..engine.folder import CATALOG, write_facts
from ..hardware.base.backend import HardwareBackend
from ..models.qwen3 import Qwen3Config, write_config
from ..sid.catalog import Catalog
from ..sid.tokenizer import build_tokenizer, layout_of, num_tokens, save_tokenizer


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder and of what it recommends. words: tokens that are no SID tokens."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    words: int
    codebook_sizes: tuple[int, ...]
    num_items: int
    spread: float = 0.02


SHAPES = {
    "onerec-1.7b": ModelShape(2048, 6144, 28, 16, 8, 128, 151_669, (8192,) * 3, 1_520_000),
    "qwen3-0.6b": ModelShape(1024, 3072, 28, 16, 8, 128, 151_669, (8192,) * 3, 1_520_000),
    "tiny": ModelShape(64, 128, 2, 4, 2, 16, 100, (64,) * 3, 20_000, spread=0.3),
}


def make_model(
    folder: str | Path,
    shape_name: str,
    backend: HardwareBackend,
    *,
    num_items: int | None = None,
    max_items: int = 2_000,
    seed: int = 0,
) -> Path:
    """Writes the folder as `polyrec train` would. num_items: instead of the shape's. max_items: longest history of a prompt.

    Errors: ConfigError `shape_unknown`, `items_out_of_range`.
    """
    if shape_name not in SHAPES:
        raise ConfigError("shape_unknown", f"There is no shape '{shape_name}'.", closest(shape_name, SHAPES))
    shape, folder = SHAPES[shape_name], Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"w{number}" for number in range(2, shape.words)]
    tokenizer = build_tokenizer(shape.codebook_sizes, words=words)
    save_tokenizer(tokenizer, folder)
    config = Qwen3Config(
        vocab_size=padded_vocab_size(num_tokens(tokenizer)),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope_theta=1e6,
        max_position_embeddings=40_960,
        initializer_range=shape.spread,
    )
    write_json(folder / "config.json", {**write_config(config), "torch_dtype": "bfloat16"})
    write_weights(folder / "model.safetensors", config, backend, seed)
    random_catalog(shape.codebook_sizes, num_items or shape.num_items, seed).save(folder / CATALOG)
    fingerprint = Catalog.fingerprint(shape.codebook_sizes, f"random {seed}")
    extra = {"made_by": "polyrec bench make-model", "shape": shape_name, "seed": seed}
    write_facts(folder, layout_of(tokenizer), PromptConfig(max_items=max_items), "basket", fingerprint, extra)
    return folder


def random_catalog(codebook_sizes: tuple[int, ...], num_items: int, seed: int) -> Catalog:
    """Items item-0… with distinct random SIDs in random order."""
    space = int(np.prod(np.array(codebook_sizes, object)))
    if not 1 <= num_items <= space // 2:  # beyond, drawing until all differ takes ever longer
        raise ConfigError(
            "items_out_of_range",
            f"{num_items:,} items of {space:,} SIDs: a random catalog holds 1 to {space // 2:,}.",
            "Ask for fewer.",
        )
    rng = np.random.default_rng(seed)
    numbers = np.zeros(0, np.int64)
    while len(numbers) < num_items:
        numbers = np.unique(np.concatenate([numbers, rng.integers(0, space, num_items + num_items // 50 + 16)]))
    numbers = rng.permutation(numbers)[:num_items]
    codes = np.stack(np.unravel_index(numbers, codebook_sizes), axis=1).astype(np.int32)
    ids = [f"item-{row}" for row in range(num_items)]
    names = [f"Item number {row}" for row in range(num_items)]
    return Catalog(ids, codes, names, rng.integers(0, 1000, num_items))


def write_weights(path: Path, config: Qwen3Config, backend: HardwareBackend, seed: int) -> None:
    """A safetensors file of bf16: normal weights of the config's spread, norms one."""
    shapes = dict(weight_shapes(config))
    header, place = {"__metadata__": {"format": "pt"}}, 0
    for name, sizes in shapes.items():
        end = place + 2 * int(np.prod(sizes))
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [place, end]}  # type: ignore[dict-item]
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    device = backend.runtime.device
    generator = torch.Generator(device=device).manual_seed(seed)
    with atomic_path(path) as temporary, open(temporary, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for sizes in shapes.values():
            weight = torch.ones(sizes, dtype=torch.bfloat16, device=device)
            if len(sizes) > 1:
                weight.normal_(0, config.initializer_range, generator=generator)
            stream.write(backend.runtime.to_host(weight).view(torch.uint8).numpy().data)


def weight_shapes(config: Qwen3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face's names of a Qwen3 with tied head -> shapes [out, in] or [D]."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (queries, hidden)
        yield prefix + "self_attn.k_proj.weight", (keys, hidden)
        yield prefix + "self_attn.v_proj.weight", (keys, hidden)
        yield prefix + "self_attn.q_norm.weight", (head,)
        yield prefix + "self_attn.k_norm.weight", (head,)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
