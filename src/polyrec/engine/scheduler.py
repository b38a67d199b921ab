"""Which waiting requests make the next batch. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from ..core.config import Settings


class BatchLimits(Settings):
    """What one batch may hold at most; a request beyond them goes alone.

    max_requests; max_tokens: prompt tokens; max_beams: requests times the widest beam.
    """

    max_requests: int = Field(64, ge=1)
    max_tokens: int = Field(16_384, ge=1)
    max_beams: int = Field(8_192, ge=1)


def plan_batch(lengths: Sequence[int], widths: Sequence[int], limits: BatchLimits) -> int:
    """How many of the waiting requests, first come first served, form the next batch (at least one when any waits).

    lengths: prompt tokens; widths: beam widths. Tokens count padded to the longest prompt, as the batch will be.
    """
    longest = widest = 0
    for count, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        longest, widest = max(longest, length), max(widest, width)
        full = (
            count + 1 > limits.max_requests
            or (count + 1) * longest > limits.max_tokens
            or (count + 1) * widest > limits.max_beams
        )
        if full:
            return max(count, 1)
    return len(lengths)
