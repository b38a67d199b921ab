"""When the next batch is due, from batches that came before."""

from __future__ import annotations

import pytest

from polyrec.engine.pace import EARLIER, MARGIN_SECONDS, NEWEST, Pace
from polyrec.engine.scheduler import first_part


def test_a_kind_that_was_never_seen_has_no_time():
    pace = Pace()
    pace.finished(4000, 8, launched=1.0, now=1.04)
    assert pace.due(4000, 1, 2.0) is None
    assert pace.due(9000, 8, 2.0) is None
    assert pace.due(4001, 9, 2.0) is not None


def test_the_next_is_launched_before_the_end_by_more_than_launches_take():
    pace = Pace()
    pace.finished(4000, 8, launched=1.0, now=1.04)
    pace.launched(0.003)
    assert pace.due(4000, 8, 2.0) == pytest.approx(2.04 - EARLIER * 0.003 - MARGIN_SECONDS)


def test_a_batch_begins_when_the_one_before_it_ends():
    pace = Pace()
    pace.finished(4000, 8, launched=1.0, now=1.04)
    pace.finished(600, 1, launched=1.01, now=1.05)  # launched while the first ran: it took 10 ms
    assert pace.due(600, 1, launched=1.02) == pytest.approx(1.06 - MARGIN_SECONDS)
    assert pace.due(600, 1, launched=1.2) == pytest.approx(1.21 - MARGIN_SECONDS)


def test_what_is_known_follows_what_is_seen():
    pace = Pace()
    for end in (1.04, 3.06):
        pace.finished(4000, 8, launched=end - (0.04 if end < 2 else 0.06), now=end)
    assert pace.due(4000, 8, 5.0) == pytest.approx(5.04 + NEWEST * 0.02 - MARGIN_SECONDS)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([1000] * 7, 7),  # too few for two
        ([1000] * 8, 4),
        ([500, 500, 7000, 100], 3),  # half of the rows, not of the requests
        ([9000], 1),
        ([], 0),
    ],
)
def test_an_idle_device_is_given_half_of_what_fills_it_twice(rows, expected):
    assert first_part(rows, 4000) == expected
