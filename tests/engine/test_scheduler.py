"""Who makes the next batch, against the rules as they are stated and against a slow reading of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrec.engine.scheduler import WASTE, BatchLimits, Candidate, choose_batch, recorded_part

CANDIDATES = st.lists(
    st.builds(Candidate, st.integers(0, 50), st.integers(1, 50), st.integers(0, 20), st.floats(0, 5)), max_size=20
)
LIMITS = st.builds(
    BatchLimits,
    max_requests=st.integers(1, 8),
    max_tokens=st.integers(1, 150),
    max_beams=st.integers(1, 200),
    ageing_tokens_per_second=st.sampled_from([0.001, 1.0, 10.0, 1000.0]),
    reserve_after_seconds=st.sampled_from([0.0, 1.0, 100.0]),
)


def rank(candidate, limits):
    return candidate.num_tokens - limits.ageing_tokens_per_second * candidate.waited


def in_order(candidates, limits):
    return sorted(range(len(candidates)), key=lambda index: (rank(candidates[index], limits), index))


def keeps_limits(batch, limits, num_pages):
    return sum(each.num_pages for each in batch) <= num_pages and (
        len(batch) == 1
        or (
            len(batch) <= limits.max_requests
            and sum(each.num_tokens for each in batch) <= limits.max_tokens
            and len(batch) * max(each.beam_width for each in batch) <= limits.max_beams
        )
    )


def is_too_large(each, limits):
    return each.num_tokens > limits.max_tokens or each.beam_width > limits.max_beams


def is_reserving(candidates, limits, num_pages):
    first = candidates[in_order(candidates, limits)[0]]
    return first.num_pages > num_pages and first.waited >= limits.reserve_after_seconds


@given(CANDIDATES, LIMITS, st.integers(0, 100))
def test_equals_taking_one_after_another(candidates, limits, num_pages):
    """The whole rule, each batch checked anew from its members."""
    expected: list[int] = []
    reserving = bool(candidates) and is_reserving(candidates, limits, num_pages)
    for index in in_order(candidates, limits):
        if reserving and candidates[index].num_pages > 0:
            continue
        if any(is_too_large(candidates[each], limits) for each in expected):
            break
        if keeps_limits([candidates[each] for each in [*expected, index]], limits, num_pages):
            expected.append(index)
    assert choose_batch(candidates, limits, num_pages) == expected


@given(CANDIDATES, LIMITS, st.integers(0, 100))
def test_rules(candidates, limits, num_pages):
    chosen = choose_batch(candidates, limits, num_pages)
    batch = [candidates[index] for index in chosen]
    assert len(set(chosen)) == len(chosen)
    assert chosen == [index for index in in_order(candidates, limits) if index in set(chosen)]
    if batch:
        assert keeps_limits(batch, limits, num_pages)
    if any(is_too_large(each, limits) for each in batch):
        assert len(batch) == 1
    with_pages = [index for index in in_order(candidates, limits) if candidates[index].num_pages <= num_pages]
    if candidates and is_reserving(candidates, limits, num_pages):
        assert all(each.num_pages == 0 for each in batch)
    elif with_pages:
        assert chosen[0] == with_pages[0]
        for index in with_pages:  # a batch that is not full has no room for any of the others
            if index not in chosen and not any(is_too_large(each, limits) for each in batch):
                assert not keeps_limits([*batch, candidates[index]], limits, num_pages)
    else:
        assert chosen == []


@given(CANDIDATES, LIMITS, st.integers(0, 100), st.floats(0, 10))
def test_order_of_two_does_not_change_with_time(candidates, limits, num_pages, later):
    """All age alike: who was before another stays before it, and waiting alone brings nobody to the front."""
    aged = [Candidate(each.num_tokens, each.beam_width, each.num_pages, each.waited + later) for each in candidates]
    for one in range(len(candidates)):
        for other in range(one):
            apart = rank(candidates[one], limits) - rank(candidates[other], limits)
            if abs(apart) > 1e-6 * limits.ageing_tokens_per_second * 15:
                order = in_order(aged, limits)
                assert (order.index(one) < order.index(other)) == (apart < 0)


def test_worked_example():
    limits = BatchLimits(max_requests=4, max_tokens=100, max_beams=100, ageing_tokens_per_second=10)
    long, short, middle = Candidate(90, 10, 9, 0), Candidate(5, 10, 1, 0), Candidate(30, 10, 3, 0)
    assert choose_batch([long, short, middle], limits, 100) == [1, 2]  # 90 more tokens do not fit
    assert choose_batch([Candidate(90, 10, 9, 9.0), short, middle], limits, 100) == [0, 1]  # counts as 0 tokens
    assert choose_batch([long, short, Candidate(31, 30, 3, 0)], limits, 100) == [1, 2]  # 2 * 30 beams
    assert choose_batch([short] * 9, limits, 100) == [0, 1, 2, 3]
    assert choose_batch([short] * 9, limits, 2) == [0, 1]
    assert choose_batch([Candidate(101, 10, 9, 0)], limits, 100) == [0]
    assert choose_batch([Candidate(5, 101, 1, 0), short], limits, 100) == [0]  # the first of equals, alone
    assert choose_batch([], limits, 100) == []


def test_ageing_is_never_off():
    with pytest.raises(ValueError):
        BatchLimits(ageing_tokens_per_second=0)


@dataclass
class Arrived:
    num_tokens: int
    num_pages: int
    at: float
    is_probe: bool = False


def wait_of_probe(probe, shorts, limits, num_pages, batch_seconds, in_flight=1):
    """Seconds that `probe`, submitted at 0 into a queue that `shorts(now)` keeps filling, waits. Pages come back after
    `in_flight` batches."""
    now, waiting, running = 0.0, [probe], []
    for _ in range(10_000):
        waiting += shorts(now)
        candidates = [Candidate(each.num_tokens, 1, each.num_pages, now - each.at) for each in waiting]
        free = num_pages - sum(each.num_pages for batch in running for each in batch)
        chosen = [waiting[index] for index in choose_batch(candidates, limits, free)]
        if probe in chosen:
            return now
        waiting = [each for each in waiting if each not in chosen]
        running = [*running, chosen][-in_flight:] if in_flight else []
        now += batch_seconds
    raise AssertionError("the request starved")


@pytest.mark.parametrize("num_tokens", [500, 2000, 20_000])
def test_steady_short_requests_do_not_starve_a_long_one(num_tokens):
    limits = BatchLimits(max_requests=4, max_tokens=16_384, ageing_tokens_per_second=1000)

    def shorts(now):
        return [Arrived(10, 0, now) for _ in range(4)]  # as many as a batch takes

    waited = wait_of_probe(Arrived(num_tokens, 0, 0.0), shorts, limits, 0, 0.1)
    assert (num_tokens - 10) / 1000 <= waited <= (num_tokens - 10) / 1000 + 0.2
    endless = limits.model_copy(update={"ageing_tokens_per_second": 1e-9})
    with pytest.raises(AssertionError, match="starved"):
        wait_of_probe(Arrived(num_tokens, 0, 0.0), shorts, endless, 0, 0.1)


def test_requests_with_few_pages_do_not_pass_one_with_many_for_ever():
    limits = BatchLimits(max_requests=1, reserve_after_seconds=1.0, ageing_tokens_per_second=10_000)

    def shorts(now):
        return [Arrived(10, 10, now)]

    many = Arrived(90, 95, 0.0)  # of 100: not to be had while any other runs
    assert 1.0 <= wait_of_probe(many, shorts, limits, 100, 0.05, in_flight=2) <= 1.3
    with pytest.raises(AssertionError, match="starved"):
        wait_of_probe(many, shorts, limits.model_copy(update={"reserve_after_seconds": 1e9}), 100, 0.05, in_flight=2)


def test_requests_without_pages_pass_one_that_waits_for_pages():
    limits = BatchLimits(reserve_after_seconds=1.0)
    waits, takes, takes_none = Candidate(10, 1, 50, 2.0), Candidate(20, 1, 1, 0.0), Candidate(15_000, 1, 0, 0.0)
    assert choose_batch([waits, takes, takes_none], limits, 49) == [2]
    assert choose_batch([waits, takes, takes_none], limits, 51) == [0, 1, 2]


@pytest.mark.parametrize(
    ("count", "tokens", "width", "expected"),
    [
        (5, 1001, 256, 4),  # 3 empty places of 8: a sixth of all rows
        (6, 1001, 256, 4),
        (7, 1001, 256, 7),  # one: less than a sixteenth
        (8, 1001, 256, 8),
        (3, 1001, 256, 3),  # two would not fill the device
        (5, 2455, 50, 5),  # the prompts are nearly all of it
        (33, 1001, 256, 33),  # more than any recorded search has: it is launched, with no empty place
    ],
)
def test_requests_go_later_rather_than_that_places_are_empty(count, tokens, width, expected):
    waiting = [Candidate(tokens, width, 1, 0.0)] * count
    assert recorded_part(waiting, (1, 2, 4, 8, 16, 32), 2, 4096) == expected
    assert recorded_part(waiting, (), 2, 4096) == count


def rows_of(batch, passes):
    """Through the model, of a search that is recorded for that many."""
    return sum(each.num_tokens for each in batch) + passes * len(batch) * max(
        (each.beam_width for each in batch), default=0
    )


def test_the_wide_one_that_waits_counts_for_those_that_go_no_more():
    waiting = [Candidate(20, 16, 1, 0.0)] * 4 + [Candidate(20, 512, 1, 0.0)]
    assert recorded_part(waiting, (1, 2, 4, 8), 2, 4096) == 5, "four narrow ones do not fill the device"
    assert recorded_part(waiting, (1, 2, 4, 8), 2, 208) == 4


@given(
    st.lists(st.builds(Candidate, st.integers(1, 3000), st.integers(1, 512), st.just(1), st.just(0.0)), min_size=1),
    st.sets(st.integers(1, 40)).map(sorted),
    st.integers(0, 3),
    st.integers(1, 10_000),
)
def test_a_part_leaves_no_empty_place_and_fills_the_device(chosen, places, passes, filling_rows):
    part = recorded_part(chosen, places, passes, filling_rows)
    width = max(each.beam_width for each in chosen)
    of_all = [place for place in places if place >= len(chosen)]
    empty = (of_all[0] - len(chosen)) * passes * width if of_all else 0
    rows = sum(each.num_tokens for each in chosen) + (of_all[0] * passes * width if of_all else 0)
    if part < len(chosen):
        assert part in places
        assert not any(part < place < len(chosen) for place in places)
        assert empty > WASTE * rows
        assert rows_of(chosen[:part], passes) >= filling_rows
    else:
        assert part == len(chosen)
        below = max((place for place in places if place < part), default=0)
        fills = rows_of(chosen[:below], passes) >= filling_rows
        assert empty <= WASTE * rows or not below or not fills
