"""Split labels against the rules in words, on random users."""

import numpy as np
import pytest

from polyrec.core.errors import DataError
from polyrec.data.histories import FIT, TEST, VALIDATION
from polyrec.data.splits import label_by_time, label_last, time_boundaries


@pytest.mark.parametrize("fewest", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_last_basket_is_test_and_the_one_before_validation(seed, fewest):
    rng = np.random.default_rng(seed)
    users = [np.repeat(np.arange(n), rng.integers(1, 4, n)) for n in rng.integers(1, 6, 50)]
    offsets = np.cumsum([0, *map(len, users)])
    labels = label_last(np.concatenate(users), offsets, fewest=fewest)
    for row, baskets in enumerate(users):
        count = baskets[-1] + 1
        wanted = [FIT] * count
        if count >= fewest:
            wanted[-1] = TEST
            if count >= 3:
                wanted[-2] = VALIDATION
        assert labels[offsets[row] : offsets[row + 1]].tolist() == [wanted[b] for b in baskets]


def test_no_users_no_labels():
    assert label_last(np.zeros(0, np.int32), np.zeros(1, np.int64), fewest=2).tolist() == []


def test_times_from_a_boundary_on_belong_to_the_later_part():
    times = np.array([5, 10, 10, 11, 20, 20, 30])
    assert label_by_time(times, 10, 20).tolist() == [FIT] + [VALIDATION] * 3 + [TEST] * 3


def test_quantiles_cut_near_the_share_and_never_through_a_tie():
    times = np.sort(np.random.default_rng(0).integers(0, 50, 10_000))
    labels = label_by_time(times, *time_boundaries(times, (0.8, 0.9)))
    assert (labels == FIT).mean() == pytest.approx(0.8, abs=0.03)
    assert (labels == TEST).mean() == pytest.approx(0.1, abs=0.03)
    parts = [set(times[labels == label].tolist()) for label in (FIT, VALIDATION, TEST)]
    assert sum(map(len, parts)) == len(set().union(*parts))


@pytest.mark.parametrize("quantiles", [(0.9, 0.8), (0.0, 0.5), (0.5, 1.0)])
def test_impossible_quantiles_are_refused(quantiles):
    with pytest.raises(DataError, match="between 0 and 1"):
        time_boundaries(np.arange(10), quantiles)


def test_boundaries_in_the_wrong_order_are_refused():
    with pytest.raises(DataError) as caught:
        label_by_time(np.arange(10), 7, 3)
    assert caught.value.code == "split_times"
