"""Sampling operations against transformers' processors, plain Python, and what draws must be distributed like."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from polyrec.hardware.ops import REFERENCE_OPS

DEAD = -math.inf
OPS = REFERENCE_OPS.sampling
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def random_logits(rows=5, size=40, seed=0):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax_with_temperatures(dtype):
    logits, temperature = random_logits().to(dtype), torch.tensor([0.1, 0.5, 1.0, 2.0, 9.0])
    found = OPS.softmax(logits, temperature)
    assert found.dtype == torch.float32
    wide = logits.double().numpy() / temperature.double().numpy()[:, None]
    expected = np.exp(wide - np.logaddexp.reduce(wide, axis=1)[:, None])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    for row, value in enumerate(temperature.tolist()):
        theirs = TemperatureLogitsWarper(value)(None, logits[row : row + 1].float()).softmax(-1)
        torch.testing.assert_close(found[row : row + 1], theirs)


@pytest.mark.parametrize("dtype", FLOATS)
def test_top_k_equals_transformers(dtype):
    logits, ks = (
        (torch.rand(5, 40, generator=torch.Generator().manual_seed(1)).argsort(-1) / 4).to(dtype),
        [1, 2, 7, 40, 99],
    )
    found = OPS.top_k_mask(logits, torch.tensor(ks))
    assert found.dtype == torch.float32
    for row, k in enumerate(ks):
        assert torch.equal(found[row], TopKLogitsWarper(k)(None, logits[row : row + 1].float())[0])


def test_top_k_keeps_the_lower_of_equals_and_exactly_k():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [DEAD, 3.0, DEAD, 3.0, DEAD]])
    found = OPS.top_k_mask(logits, torch.tensor([2, 1]))
    assert found.tolist() == [[DEAD, 2.0, 2.0, DEAD, DEAD], [DEAD, 3.0, DEAD, DEAD, DEAD]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_top_p_equals_transformers(dtype):
    logits, ps = (
        (torch.rand(5, 40, generator=torch.Generator().manual_seed(2)).argsort(-1) / 8).to(dtype),
        [0.05, 0.3, 0.8, 0.97, 1.0],
    )
    found = OPS.top_p_mask(logits, torch.tensor(ps))
    assert found.dtype == torch.float32
    for row, p in enumerate(ps):
        assert torch.equal(found[row], TopPLogitsWarper(p)(None, logits[row : row + 1].float())[0])


def test_top_p_at_its_ends_and_ties():
    logits = torch.tensor([[2.0, 2.0, 2.0, 2.0]] * 4)  # four quarters: exact in binary
    found = OPS.top_p_mask(logits, torch.tensor([0.0, 0.5, 0.51, 1.0])).isfinite()
    assert found.sum(1).tolist() == [1, 2, 3, 4]
    assert found[:3, 0].all()
    assert not found[:3, 3].any()
    masked = torch.tensor([[DEAD, 1.0, DEAD]])
    assert OPS.top_p_mask(masked, torch.tensor([0.9])).tolist() == masked.tolist()


def test_penalties_in_plain_python():
    logits = random_logits(4, 12, seed=3)
    counts = torch.randint(0, 4, (4, 12), generator=torch.Generator().manual_seed(4))
    repetition, presence, frequency = [1.0, 1.3, 0.8, 2.0], [0.0, 0.5, -0.5, 0.0], [0.0, 0.25, 0.1, -0.2]
    found = OPS.penalize(logits, counts, *(torch.tensor(values) for values in (repetition, presence, frequency)))
    for row in range(4):
        for column in range(12):
            value, count = float(logits[row, column]), int(counts[row, column])
            if count:
                value = value / repetition[row] if value > 0 else value * repetition[row]
                value -= presence[row] + frequency[row] * count
            assert float(found[row, column]) == pytest.approx(value, abs=1e-6)
    assert torch.equal(found[0], logits[0])  # 1, 0 and 0 change nothing


def test_repetition_equals_transformers():
    logits, ids = random_logits(1, 20, seed=5), torch.tensor([[3, 3, 7, 19]])
    counts = torch.bincount(ids[0], minlength=20)[None]
    zero = torch.zeros(1)
    found = OPS.penalize(logits, counts, torch.tensor([1.7]), zero, zero)
    torch.testing.assert_close(found, RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_mask(dtype):
    logits, allowed = random_logits(3, 9, seed=6).to(dtype), random_logits(3, 9, seed=7) > 0
    found = OPS.mask(logits, allowed)
    assert found.dtype == torch.float32
    for place in np.ndindex(3, 9):
        assert float(found[place]) == (float(logits[place]) if allowed[place] else DEAD)


def test_gumbel_top_k_in_plain_python():
    logits, noise = random_logits(4, 15, seed=8), torch.rand(4, 15, generator=torch.Generator().manual_seed(9))
    values, indices = OPS.gumbel_top_k(logits, noise, 6)
    for row in range(4):
        sums = [float(logits[row, c]) - math.log(-math.log(float(noise[row, c]))) for c in range(15)]
        order = sorted(range(15), key=lambda c: -sums[c])[:6]
        assert indices[row].tolist() == order
        np.testing.assert_allclose(values[row].numpy(), [sums[c] for c in order], rtol=1e-5, atol=1e-5)


def test_gumbel_draws_follow_the_probabilities():
    """Without replacement: the first by p, the second by p among the rest."""
    draws = 40_000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    noise = torch.rand(draws, 4, generator=torch.Generator().manual_seed(10)).clamp_min(1e-7)
    first, second = OPS.gumbel_top_k(logits.expand(draws, 4), noise, 2)[1].T
    p = np.exp(logits.double().numpy()) / np.exp(logits.double().numpy()).sum()
    pairs = np.array([[0 if a == b else p[a] * p[b] / (1 - p[a]) for b in range(4)] for a in range(4)])
    found = torch.bincount(first * 4 + second, minlength=16).numpy().reshape(4, 4) / draws
    assert (np.abs(found - pairs) <= 5 * np.sqrt(pairs * (1 - pairs) / draws)).all()


def test_gumbel_leaves_masked_entries_to_the_end():
    logits = torch.tensor([[DEAD, 0.0, DEAD, -50.0]])
    values, indices = OPS.gumbel_top_k(logits, torch.full((1, 4), 0.5), 4)
    assert indices.tolist() == [[1, 3, 0, 2]]
    assert values[0, 2:].tolist() == [DEAD, DEAD]
