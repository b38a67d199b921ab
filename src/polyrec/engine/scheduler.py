"""Which waiting requests make the next batch. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from ..core.config import Settings

WASTE = 1 / 16  # of a batch's rows, that may be of places without a request: an estimate


class BatchLimits(Settings):
    """What one batch may hold at most (a request beyond max_tokens or max_beams goes alone), and who comes first.

    max_requests; max_tokens: prompt tokens to prefill; max_beams: requests times the widest beam.
    ageing_tokens_per_second: so much shorter than it is does a request count for every second that it has waited. A prompt of
    L tokens therefore gives way to shorter ones for L / ageing seconds at most: with the default, half a second for 5,000.
    reserve_after_seconds: pages are kept free for a request that is first in order and has waited so long. Batches in flight
    give theirs back within a few hundred milliseconds, so one that waited longer was overtaken.
    filling_rows: rows through the model (prompts' tokens, and beams of each pass) from which on a batch takes as much longer as
    it has more of them; half of what waits goes first where each half has so many.
    """

    max_requests: int = Field(64, ge=1)
    max_tokens: int = Field(16_384, ge=1)
    max_beams: int = Field(8_192, ge=1)
    ageing_tokens_per_second: float = Field(10_000.0, gt=0, allow_inf_nan=False)
    reserve_after_seconds: float = Field(1.0, ge=0, allow_inf_nan=False)
    filling_rows: int = Field(4_096, ge=1)


@dataclass(frozen=True)
class Candidate:
    """A waiting request as the scheduler sees it.

    num_tokens: prompt tokens that it would have to prefill, those that are cached left out. num_pages: pages of the pool that
    it needs beyond those that it shares with the cache. waited: seconds since it was submitted.
    """

    num_tokens: int
    beam_width: int
    num_pages: int
    waited: float


def choose_batch(candidates: Sequence[Candidate], limits: BatchLimits, num_pages: int) -> list[int]:
    """Indices of the candidates that make the next batch, the first in order first. num_pages: pages that can be had now.

    In order are those with the fewest tokens, less what their waiting is worth; of equals, the one given first. Each is taken
    that fits beside those taken before it; one that does not fit is skipped, and later ones may fill the batch. The first
    whose pages are there is always taken, beyond the limits too (then alone). Prompts are packed: tokens count as they are.
    """
    if len(candidates) <= 1:
        return [0] if candidates and candidates[0].num_pages <= num_pages else []
    ageing = limits.ageing_tokens_per_second
    # 0.25 ms for 1,000 that wait (the engine's thread pays it once a batch), half of it these two lines.
    keys = [each.num_tokens - ageing * each.waited for each in candidates]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    first = candidates[order[0]]
    if first.num_pages > num_pages and first.waited >= limits.reserve_after_seconds:
        num_pages = 0
    chosen: list[int] = []
    tokens = widest = pages = 0
    for index in order:
        each = candidates[index]
        if pages + each.num_pages > num_pages:
            continue
        count, wider = len(chosen) + 1, max(widest, each.beam_width)
        if tokens + each.num_tokens > limits.max_tokens or count * wider > limits.max_beams:
            if chosen:
                continue
            return [index]
        chosen.append(index)
        tokens, widest, pages = tokens + each.num_tokens, wider, pages + each.num_pages
        if count == limits.max_requests:
            break
    return chosen


def first_part(rows: Sequence[int], filling_rows: int) -> int:
    """How many of a batch's requests, of so many rows each, a device that idles is given first: half of the rows, where both
    halves fill it. The first are then answered in half the time and the others about as soon, and the host works on the answers
    and on the next batch while the device works; else all."""
    total = sum(rows)
    if total < 2 * filling_rows:
        return len(rows)
    done = 0
    for count, each in enumerate(rows, 1):
        done += each
        if 2 * done >= total:
            return count
    return len(rows)


def recorded_part(chosen: Sequence[Candidate], places: Sequence[int], passes: int, filling_rows: int) -> int:
    """How many of a batch's requests, the first in order, go now. places: requests for which searches are recorded, rising;
    none: all go.

    The rows of places without a request take as long as others. Where they would be more than WASTE of all, and fewer requests
    without such places fill the device too, the others go with the next batch: eight clients whose batches are 5 and 3 of 8 and
    4 places come to be 4 and 4.
    """
    count = len(chosen)
    above, below = bisect_left(places, count), bisect_right(places, count) - 1
    if below < 0 or above == len(places) or places[above] == count:
        return count
    of_search = passes * max(each.beam_width for each in chosen)
    rows = sum(each.num_tokens for each in chosen) + places[above] * of_search
    if (places[above] - count) * of_search <= WASTE * rows:
        return count
    first = chosen[: places[below]]
    of_search = passes * max(each.beam_width for each in first)
    fills = sum(each.num_tokens for each in first) + len(first) * of_search >= filling_rows
    return len(first) if fills else count
