"""The restricted head under each score rule equals a slice of the whole vocabulary's logits in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from polyrec.core.request import SCORE_RULES
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.layers.head import RestrictedHead

# Levels need not touch: a token of another kind stands between the last two.
ROWS = ((3, 9), (9, 13), (14, 21))
VOCABULARY = 25


def parts(seed=0, shape=(2, 5, 8)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator), torch.randn(VOCABULARY, shape[-1], generator=generator)


@pytest.mark.parametrize("level", range(3))
@pytest.mark.parametrize("rule", SCORE_RULES)
def test_logits_and_normaliser(rule, level):
    hidden, weight = parts()
    logits, normalizer = RestrictedHead(weight, ROWS, rule, REFERENCE_OPS)(hidden, level)
    whole = hidden.double().numpy() @ weight.double().numpy().T
    start, stop = ROWS[level]
    np.testing.assert_allclose(logits.numpy(), whole[..., start:stop], atol=1e-5)
    over = {
        "level": np.arange(start, stop),
        "sid": np.concatenate([np.arange(*rows) for rows in ROWS]),
        "vocab": np.arange(VOCABULARY),
    }
    if rule == "children":
        assert normalizer is None
    else:
        np.testing.assert_allclose(normalizer.numpy(), np.logaddexp.reduce(whole[..., over[rule]], axis=-1), atol=1e-5)


@pytest.mark.parametrize("rule", SCORE_RULES)
def test_half_precision_weights_give_fp32_scores(rule):
    hidden, weight = parts(seed=1)
    logits, normalizer = RestrictedHead(weight.bfloat16(), ROWS, rule, REFERENCE_OPS)(hidden.bfloat16(), 1)
    assert logits.dtype == torch.float32
    assert normalizer is None or normalizer.dtype == torch.float32


@pytest.mark.parametrize("rule", SCORE_RULES)
def test_a_level_reads_its_own_rows_only(rule):
    """What each rule costs: `level` and `children` never touch other rows, `sid` no row outside the levels."""
    hidden, weight = parts(seed=2)
    read = {"level": [ROWS[0]], "children": [ROWS[0]], "sid": list(ROWS), "vocab": [(0, VOCABULARY)]}[rule]
    outside = torch.ones(VOCABULARY, dtype=torch.bool)
    for start, stop in read:
        outside[start:stop] = False
    weight[outside] = float("nan")
    logits, normalizer = RestrictedHead(weight, ROWS, rule, REFERENCE_OPS)(hidden, 0)
    assert logits.isfinite().all()
    assert normalizer is None or normalizer.isfinite().all()


def test_a_level_is_a_view_of_the_weight():
    hidden, weight = parts(seed=3)
    head = RestrictedHead(weight, ROWS, "level", REFERENCE_OPS)
    before = head(hidden, 2).logits.clone()
    weight[ROWS[2][0] : ROWS[2][1]] *= 2
    torch.testing.assert_close(head(hidden, 2).logits, 2 * before)


def test_the_rule_level_runs_the_fused_op():
    """One op for a level's logits and their log-sum-exp, so that a platform can make both in one pass."""
    calls = []

    def restricted_log_softmax(hidden, weight):
        calls.append(len(weight))
        return REFERENCE_OPS.search.restricted_log_softmax(hidden, weight)

    ops = replace(REFERENCE_OPS, search=replace(REFERENCE_OPS.search, restricted_log_softmax=restricted_log_softmax))
    hidden, weight = parts(seed=4)
    for rule in SCORE_RULES:
        RestrictedHead(weight, ROWS, rule, ops)(hidden, 1)
    assert calls == [ROWS[1][1] - ROWS[1][0]]
