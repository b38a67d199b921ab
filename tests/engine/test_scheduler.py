"""A batch is the longest run of waiting requests that keeps every limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polyrec.engine.scheduler import BatchLimits, plan_batch

REQUESTS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=20)


def fits(requests, limits):
    lengths, widths = zip(*requests, strict=True)
    count = len(requests)
    return (
        count <= limits.max_requests
        and count * max(lengths) <= limits.max_tokens
        and count * max(widths) <= limits.max_beams
    )


@given(REQUESTS, st.integers(1, 8), st.integers(1, 200), st.integers(1, 200))
def test_equals_trying_every_size(requests, max_requests, max_tokens, max_beams):
    limits = BatchLimits(max_requests=max_requests, max_tokens=max_tokens, max_beams=max_beams)
    planned = plan_batch([length for length, _ in requests], [width for _, width in requests], limits)
    if not requests:
        assert planned == 0
        return
    largest = max((size for size in range(1, len(requests) + 1) if fits(requests[:size], limits)), default=0)
    assert planned == max(largest, 1)  # one that breaks the limits goes alone


def test_order_is_kept_for_a_large_request_in_front():
    limits = BatchLimits(max_requests=8, max_tokens=100, max_beams=100)
    assert plan_batch([500, 1, 1], [1, 1, 1], limits) == 1
    assert plan_batch([1, 1, 500], [1, 1, 1], limits) == 2
