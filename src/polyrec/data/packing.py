"""Packs training examples into the flat arrays of one batch, and says which position predicts which code. No torch.

An example is a prompt and some targets that may follow it. The targets are branches: each sees the prompt and itself, never
another branch, so one pass over the prompt trains all of them. It is the same shape as the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..sid.layout import SidLayout


@dataclass(frozen=True)
class Example:
    """prompt: int64 [T], ends with `<|sid_begin|>`. targets: int [M, S] codes. weights: fp32 [M].
    prompt_weight: weight of each code inside the prompt, predicted from what stands before it.
    basket_weight: weight of each item's first code, predicted from the start of its basket (order inside means nothing)."""

    prompt: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    prompt_weight: float = 0.0
    basket_weight: float = 0.0


@dataclass(frozen=True)
class LevelLabels:
    """What one level's head must predict. index: int64 [E] packed positions; code: int64 [E]; weight: fp32 [E]."""

    index: np.ndarray
    code: np.ndarray
    weight: np.ndarray


@dataclass(frozen=True)
class PackedBatch:
    """token_ids, positions, branch: int64 [T], sequence after sequence (branch 0: prompt, b: b-th target).
    lengths: int64 [R] tokens of each sequence. labels: one per level."""

    token_ids: np.ndarray
    positions: np.ndarray
    branch: np.ndarray
    lengths: np.ndarray
    labels: tuple[LevelLabels, ...]

    @property
    def num_labels(self) -> int:
        """Codes to predict, over all levels."""
        return sum(len(labels.index) for labels in self.labels)


def pack(examples: Sequence[Example], layout: SidLayout) -> PackedBatch:
    """Packs examples in order."""
    depth = layout.depth
    tokens, positions, branches, lengths = [], [], [], []
    found: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in range(depth)]
    start = 0
    for example in examples:
        prompt, num = example.prompt, len(example.targets)
        target_tokens = layout.tokens(example.targets)
        tokens += [prompt, target_tokens[:, :-1].reshape(-1)]
        positions += [np.arange(len(prompt)), np.tile(len(prompt) + np.arange(depth - 1), num)]
        branches += [np.zeros(len(prompt), np.int64), np.repeat(np.arange(1, num + 1), depth - 1)]
        length = len(prompt) + num * (depth - 1)
        lengths.append(length)
        # A target's first code follows the prompt's last token; each later one follows the code before it.
        branch_start = start + len(prompt) + np.arange(num) * (depth - 1)
        for level in range(depth):
            index = np.full(num, start + len(prompt) - 1) if level == 0 else branch_start + level - 1
            found[level].append((index, example.targets[:, level], example.weights))
        if example.prompt_weight:
            for level, index, code in prompt_labels(prompt, layout):
                found[level].append((start + index, code, np.full(len(index), example.prompt_weight)))
        if example.basket_weight:
            index, code = basket_labels(prompt, layout)
            found[0].append((start + index, code, np.full(len(index), example.basket_weight)))
        start += length
    labels = tuple(
        LevelLabels(
            np.concatenate([part[0] for part in parts]).astype(np.int64),
            np.concatenate([part[1] for part in parts]).astype(np.int64),
            np.concatenate([part[2] for part in parts]).astype(np.float32),
        )
        for parts in found
    )
    return PackedBatch(
        np.concatenate(tokens), np.concatenate(positions), np.concatenate(branches), np.array(lengths), labels
    )


def prompt_labels(prompt: np.ndarray, layout: SidLayout) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """For each level of prompt int [T]: its number, the positions int [M] whose next token is a code of it, those codes [M]."""
    following = prompt[1:]
    labels = []
    for level, (first, size) in enumerate(zip(layout.level_starts, layout.codebook_sizes, strict=True)):
        index = np.flatnonzero((following >= first) & (following < first + size))
        labels.append((level, index, following[index] - first))
    return labels


def basket_labels(prompt: np.ndarray, layout: SidLayout) -> tuple[np.ndarray, np.ndarray]:
    """For every item of prompt int [T]: the position of the `<|sid_begin|>` that opens its basket, and the item's first code,
    both int [M]."""
    first, size = layout.level_starts[0], layout.codebook_sizes[0]
    begins = np.flatnonzero(prompt == layout.begin)
    items = np.flatnonzero((prompt >= first) & (prompt < first + size))
    opened = np.searchsorted(begins, items) - 1
    kept = opened >= 0
    return begins[opened[kept]], prompt[items[kept]] - first
