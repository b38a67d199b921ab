"""The reference of the conformance suite, against torch's own attention and against attention over a written-out sequence."""

from __future__ import annotations

import torch

from polyrec.hardware.base.attention import AttentionNeeds
from polyrec.testing.brute_force import attend, beam_attention, packed_attention, within


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_one_token_equals_torchs_attention():
    query, key, value = normal(6, 8), normal(5, 2, 8, seed=1), normal(5, 2, 8, seed=2)
    shaped = query[None, :, None], key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    expected = torch.nn.functional.scaled_dot_product_attention(*shaped, enable_gqa=True).flatten()
    torch.testing.assert_close(attend(query, key, value), expected)


def test_a_soft_cap_bends_the_scores():
    query, key, value = normal(2, 4) * 3, normal(5, 2, 4, seed=1), normal(5, 2, 4, seed=2)
    expected = []
    for head in range(2):
        weights = torch.softmax(0.7 * torch.tanh(key[:, head] @ query[head] / 2 / 0.7), 0)
        expected.append(weights @ value[:, head])
    torch.testing.assert_close(attend(query, key, value, 0.7), torch.cat(expected))


def test_a_window_ends_with_the_token_itself():
    assert within(None, [3, 4, 9]) == [3, 4, 9]
    assert within(2, [3, 4, 9]) == [4, 9]
    assert within(1, [3, 4, 9]) == [9]


def test_a_branch_is_its_prompt_and_itself_written_out():
    needs = AttentionNeeds(1, 2, 1, 4, sliding_window=3)
    qkv = normal(9, 2, 4), normal(9, 1, 4, seed=1), normal(9, 1, 4, seed=2)
    found = packed_attention(*qkv, (2, 7), (0, 0, 0, 0, 1, 2, 2, 1, 3), needs)
    for tokens in ([0, 1], [2, 3, 4, 7], [2, 3, 5, 6], [2, 3, 8]):
        alone = packed_attention(*(part[tokens] for part in qkv), (len(tokens),), None, needs)
        torch.testing.assert_close(found[tokens], alone)


def test_a_beam_is_the_last_token_of_its_own_sequence():
    for window in (None, 1, 3):
        needs = AttentionNeeds(1, 2, 1, 4, sliding_window=window)
        query, key, value = normal(6, 2, 4), normal(6, 1, 4, seed=1), normal(6, 1, 4, seed=2)
        own = list(zip(key[4:], value[4:], strict=True))
        expected = packed_attention(query, key, value, (6,), None, needs)[-1]
        torch.testing.assert_close(beam_attention(query[-1], (key[:4], value[:4]), own, needs), expected)
