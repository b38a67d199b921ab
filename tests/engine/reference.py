"""A slow, plain beam search over a set of SIDs: what the engine must equal. Every prefix is run whole, in float64."""

from __future__ import annotations

import numpy as np
import torch

from polyrec.attention.layout import packed_layout
from polyrec.attention.sdpa import PackedPlan
from polyrec.hardware import get_hardware_backend
from polyrec.models.qwen3 import Qwen3, Qwen3Config
from polyrec.sid.layout import SidLayout


def tiny_model(layout: SidLayout, seed: int, *, spread: float = 0.5) -> Qwen3:
    """A random model whose vocabulary ends a little after the layout's."""
    config = Qwen3Config(
        vocab_size=layout.end + 3,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=seed % 2 == 0,
        initializer_range=spread,
    )
    model = Qwen3(config, get_hardware_backend().ops)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model.eval()


def next_log_probs(model64: Qwen3, layout: SidLayout, tokens: list[int], rule: str, legal: list[int]) -> np.ndarray:
    """Log-probability of each code of the level that follows `tokens`, under a score rule of DESIGN section 4."""
    hidden = model64(
        torch.tensor(tokens), torch.arange(len(tokens)), PackedPlan(packed_layout(torch.tensor([len(tokens)])))
    )[-1]
    logits = (model64.head_weight @ hidden).detach().numpy()
    level = len(tokens) - 1 - max(i for i, token in enumerate(tokens) if token == layout.begin)
    rows = [np.arange(s, s + c) for s, c in zip(layout.level_starts, layout.codebook_sizes, strict=True)]
    own = logits[rows[level]]
    over = {
        "level": own,
        "sid": logits[np.concatenate(rows)],
        "vocab": logits,
        "children": own[legal],
    }[rule]
    return own - np.logaddexp.reduce(over)


def beam_search(
    model64: Qwen3, layout: SidLayout, prompt: list[int], items: set[tuple[int, ...]], width: int, rule: str
) -> list[tuple[tuple[int, ...], float]]:
    """The `width` best SIDs of `items`, best first; ties to the lower SID."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for level in range(layout.depth):
        grown = []
        for codes, score in beams:
            legal = sorted({item[level] for item in items if item[:level] == codes})
            if not legal:
                continue
            tokens = prompt + [layout.level_starts[lv] + code for lv, code in enumerate(codes)]
            gains = next_log_probs(model64, layout, tokens, rule, legal)
            grown += [((*codes, code), score + gains[code]) for code in legal]
        beams = sorted(grown, key=lambda beam: (-beam[1], beam[0]))[:width]
    return beams


def random_items(rng: np.random.Generator, sizes: tuple[int, ...], num: int) -> np.ndarray:
    """Distinct random SIDs with uneven fan-out: codes are drawn from a skewed law, so some prefixes have one child."""
    codes = {tuple(int(min(size - 1, rng.geometric(min(1.0, 2.0 / size)) - 1)) for size in sizes) for _ in range(num)}
    return np.array(sorted(codes, key=lambda _: rng.random()))
