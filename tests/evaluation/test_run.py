"""The comparison as a whole: an oracle gets everything, files say what the result says, masks follow the protocol."""

from __future__ import annotations

import numpy as np
import pytest

from polyrec.core.errors import DataError
from polyrec.data.histories import select_events
from polyrec.evaluation.result import EvaluationResult
from polyrec.evaluation.run import evaluate


def oracle(asked, k, mask_seen):
    ranked = np.full((len(asked), k), -1, np.int32)
    for row in range(len(asked)):
        target = asked.target(row)[:k]
        ranked[row, : len(target)] = target
        if mask_seen:
            assert not set(target.tolist()) & set(asked.history(row)[0].tolist())
    return ranked


@pytest.mark.parametrize(
    ("kind", "names"),
    [("basket", ["popularity", "basket itemKNN"]), ("sequence", ["popularity", "itemKNN A", "itemKNN B"])],
)
def test_oracle_beside_the_baselines(make_histories, tmp_path, kind, names):
    rates = {"oracle": lambda asked, k: 0.25}
    result = evaluate({"oracle": oracle}, make_histories(9, kind, 60), ks=(4, 2), samples=50, invalid_rates=rates)
    assert result.ks == (2, 4)
    for protocol in ("new", "all"):
        found = result.protocols[protocol]
        assert list(found.methods) == ["oracle", *names]
        assert found.methods["oracle"].metrics["NDCG@4"] == pytest.approx((1, 1, 1))
        assert found.methods["oracle"].rates["Invalid@4"] == 0.25
        for name in names:
            difference = found.differences[name]["NDCG@4"]
            assert difference.mean == pytest.approx(1 - found.methods[name].metrics["NDCG@4"].mean)
            assert difference.low <= difference.mean <= difference.high
    paths = result.save(tmp_path)
    assert EvaluationResult.load(paths[0]) == result
    markdown = paths[1].read_text(encoding="utf-8")
    assert all(name in markdown for name in names)
    assert paths[2].read_bytes()[:4] == b"\x89PNG"
    assert [table.row_count for table in result.to_tables()] == [1 + len(names)] * 2


def test_a_rate_that_cannot_be_measured_is_left_out(make_histories, tmp_path):
    """Not counted from the constrained ranking instead, where it would be 0."""
    result = evaluate(
        {"oracle": oracle}, make_histories(9, "basket", 60), ks=(2, 4), samples=50,
        invalid_rates={"oracle": lambda asked, k: None},
    )  # fmt: skip
    for found in result.protocols.values():
        assert not any("Invalid" in rate for rate in found.methods["oracle"].rates)
        assert "Invalid@4" in found.methods["popularity"].rates
    assert EvaluationResult.load(result.save(tmp_path)[0]) == result
    assert len(result.to_tables()) == 2


def test_max_users_is_a_seeded_draw(make_histories):
    asked_users = []

    def note(asked, k, mask_seen):
        asked_users.append(asked.users.tolist())
        return oracle(asked, k, mask_seen)

    for seed in (1, 1, 2):
        evaluate({"m": note}, make_histories(10, "basket", 60), protocols=("all",), max_users=20, samples=10, seed=seed)
    assert [len(users) for users in asked_users] == [20, 20, 20]
    assert asked_users[0] == asked_users[1] != asked_users[2]


def test_nobody_to_ask(make_histories):
    histories = make_histories(11, "sequence")
    fit_only = select_events(histories, histories.split == 0)
    with pytest.raises(DataError) as caught:
        evaluate({}, fit_only)
    assert caught.value.code == "no_evaluation_users"
