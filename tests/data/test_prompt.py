"""The prompt builder equals a plain loop over the history, and its digest follows its settings."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from polyrec.core.config import make_settings
from polyrec.core.errors import ConfigError
from polyrec.data.prompt import PromptBuilder, PromptConfig, num_dropped
from polyrec.sid.layout import SidLayout


def plain_prompt(layout, codes, baskets, config):
    """The history cut by whole blocks from its old end, then token after token."""
    items = list(zip(codes.tolist(), baskets.tolist(), strict=True))
    while len(items) > config.max_items:
        items = items[config.block :]
    tokens, before = [], None
    for sid, basket in items:
        if config.basket_token and basket != before:
            tokens.append(layout.begin)
        before = basket
        tokens += [start + code for start, code in zip(layout.level_starts, sid, strict=True)]
    return [*tokens, layout.begin]


def random_history(rng, sizes, length):
    codes = np.stack([rng.integers(0, size, length) for size in sizes], axis=1)
    return codes, np.sort(rng.integers(0, max(1, length // 2), length)).astype(np.int32)


@pytest.mark.parametrize("basket_token", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_equals_a_plain_loop(basket_token, depth):
    rng = np.random.default_rng(depth)
    sizes = tuple(rng.integers(1, 9, depth).tolist())
    layout = SidLayout.contiguous(sizes, 2)
    for _ in range(60):
        max_items = int(rng.integers(1, 9))
        block = int(rng.integers(1, max_items + 1))
        config = PromptConfig(max_items=max_items, block=block, basket_token=basket_token)
        builder = PromptBuilder(layout, config)
        codes, some_together = random_history(rng, sizes, int(rng.integers(0, 25)))
        for baskets in (some_together, np.arange(len(codes))):
            prompt = builder.build(codes, baskets)
            assert prompt.dtype == np.int64
            assert prompt.tolist() == plain_prompt(layout, codes, baskets, config)
            assert prompt[-1] == layout.begin
            assert len(prompt) <= builder.max_tokens
        np.testing.assert_array_equal(builder.build(codes, None), prompt)


def test_max_tokens_is_reached():
    layout = SidLayout.contiguous((4, 4, 4), 2)
    for basket_token in (True, False):
        builder = PromptBuilder(layout, PromptConfig(max_items=6, basket_token=basket_token))
        assert len(builder.build(np.zeros((9, 3), int), np.arange(9))) == builder.max_tokens


@pytest.mark.parametrize(("max_items", "block"), [(10, 1), (10, 4), (10, 10), (7, 3)])
def test_a_growing_history_keeps_its_prefix_for_a_block(max_items, block):
    """What a prefix cache lives from: between two cuts the prompt only grows at its end, and a cut takes `block` items."""
    config = PromptConfig(max_items=max_items, block=block)
    dropped = [num_dropped(length, config) for length in range(60)]
    assert dropped[: max_items + 1] == [0] * (max_items + 1)
    for length, (before, after) in enumerate(pairwise(dropped), start=1):
        assert after - before in (0, block)
        assert max_items - block < length - after <= max_items or after == 0
    builder = PromptBuilder(SidLayout.contiguous((50, 50), 2), config)
    codes, baskets = np.stack([np.arange(50), np.arange(50)], 1), np.arange(50)
    for length in range(1, 50):
        if dropped[length + 1] == dropped[length]:
            shorter, longer = (builder.build(codes[:n], baskets[:n]) for n in (length, length + 1))
            np.testing.assert_array_equal(longer[: len(shorter)], shorter)


def test_the_digest_changes_with_every_setting():
    base = PromptConfig()
    assert PromptConfig(max_items=base.max_items).digest == base.digest
    others = [
        PromptConfig(max_items=base.max_items + 1),
        PromptConfig(block=base.block + 1),
        PromptConfig(basket_token=not base.basket_token),
    ]
    assert len(others) == len(PromptConfig.model_fields), "a new setting needs a line here"
    assert len({config.digest for config in [base, *others]}) == 1 + len(others)


@pytest.mark.parametrize("values", [{"max_items": 0}, {"block": 0}, {"max_items": 5, "block": 6}])
def test_settings_that_would_empty_a_prompt_are_refused(values):
    with pytest.raises(ConfigError) as error:
        make_settings(PromptConfig, values)
    assert error.value.code == "config_invalid"
