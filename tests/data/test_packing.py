"""Packed batches equal what a walk over each example, token by token, gives."""

from __future__ import annotations

import numpy as np
import pytest

from polyrec.data.packing import Example, pack
from polyrec.data.prompt import PromptBuilder, PromptConfig
from polyrec.sid.layout import SidLayout


def random_examples(rng, layout, *, basket_token, prompt_weight, basket_weight):
    builder = PromptBuilder(layout, PromptConfig(max_items=6, basket_token=basket_token))
    examples = []
    for _ in range(int(rng.integers(1, 6))):
        draw = lambda num: np.stack([rng.integers(0, size, num) for size in layout.codebook_sizes], axis=1)  # noqa: E731
        length, num = int(rng.integers(0, 9)), int(rng.integers(1, 5))
        prompt = builder.build(draw(length), np.sort(rng.integers(0, 4, length)))
        examples.append(Example(prompt, draw(num), rng.random(num), prompt_weight, basket_weight))
    return examples


def walk(examples, layout):
    """Tokens, positions, branches, and per level the labels (packed position, code, weight), one by one."""
    tokens, positions, branches, lengths = [], [], [], []
    labels = [[] for _ in range(layout.depth)]
    level_of = {
        start + code: (level, code)
        for level, (start, size) in enumerate(zip(layout.level_starts, layout.codebook_sizes, strict=True))
        for code in range(size)
    }
    for example in examples:
        start, opened = len(tokens), None
        for place, token in enumerate(example.prompt.tolist()):
            if token in level_of:
                level, code = level_of[token]
                if example.prompt_weight and place > 0:
                    labels[level].append((len(tokens) - 1, code, example.prompt_weight))
                if example.basket_weight and level == 0 and opened is not None:
                    labels[0].append((opened, code, example.basket_weight))
            else:
                opened = len(tokens)
            tokens.append(token)
            positions.append(place)
            branches.append(0)
        end = len(tokens) - 1
        for branch, (target, weight) in enumerate(zip(example.targets.tolist(), example.weights, strict=True), start=1):
            place = end
            for level, code in enumerate(target):
                labels[level].append((place, code, weight))
                if level < layout.depth - 1:  # the last code is predicted, never read
                    place = len(tokens)
                    tokens.append(layout.level_starts[level] + code)
                    positions.append(len(example.prompt) + level)
                    branches.append(branch)
        lengths.append(len(tokens) - start)
    return tokens, positions, branches, lengths, labels


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("basket_token", [True, False])
@pytest.mark.parametrize(("prompt_weight", "basket_weight"), [(0.0, 0.0), (0.5, 0.0), (0.0, 2.0), (1.0, 0.25)])
def test_equals_a_walk(depth, basket_token, prompt_weight, basket_weight):
    rng = np.random.default_rng(depth)
    for _ in range(10):
        layout = SidLayout.contiguous(tuple(rng.integers(2, 9, depth).tolist()), 3)
        weights = {"prompt_weight": prompt_weight, "basket_weight": basket_weight}
        examples = random_examples(rng, layout, basket_token=basket_token, **weights)
        batch = pack(examples, layout)
        tokens, positions, branches, lengths, labels = walk(examples, layout)
        assert batch.token_ids.tolist() == tokens
        assert batch.positions.tolist() == positions
        assert batch.branch.tolist() == branches
        assert batch.lengths.tolist() == lengths
        assert batch.num_labels == sum(map(len, labels))
        for found, expected in zip(batch.labels, labels, strict=True):
            got = sorted(zip(found.index.tolist(), found.code.tolist(), found.weight.tolist(), strict=True))
            np.testing.assert_allclose(got, np.array(sorted(expected)).reshape(-1, 3), rtol=1e-6)
            assert (found.index.dtype, found.code.dtype, found.weight.dtype) == (np.int64, np.int64, np.float32)


def test_every_prompt_code_but_an_unpreceded_one_is_labelled():
    layout = SidLayout.contiguous((4, 4, 4), 2)
    codes = np.array([[0, 1, 2], [3, 2, 1]])
    for basket_token, expected in (
        (True, 6),
        (False, 5),
    ):  # without a basket token nothing stands before the first code
        prompt = PromptBuilder(layout, PromptConfig(basket_token=basket_token)).build(codes, np.array([0, 0]))
        batch = pack([Example(prompt, codes[:1], np.ones(1), prompt_weight=1.0)], layout)
        assert batch.num_labels == expected + 3
