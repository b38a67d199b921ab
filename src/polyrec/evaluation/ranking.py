"""From scores to rankings, and from many users to blocks of them: the array work that baselines and runs share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..data.histories import EvalSet

EMPTY = -1


def top_k(scores: np.ndarray, k: int, floor: float = -np.inf) -> np.ndarray:
    """The k best columns of each row, best first, ties to the lower column.

    scores: float [N, I]. Only scores above `floor` count; int32 [N, k], EMPTY where a row has fewer.
    Scores are compared as float32, so that the same terms summed in another order still tie.
    """
    scores = scores.astype(np.float32, copy=False)
    num_rows, num_items = scores.shape
    kept = scores > floor
    if k < num_items:
        kth = np.partition(scores, num_items - k, axis=1)[:, num_items - k]
        kept &= scores >= kth[:, None]
    rows, columns = np.nonzero(kept)
    order = np.lexsort((columns, -scores[rows, columns], rows))
    rows, columns = rows[order], columns[order]
    place = np.arange(len(rows)) - np.searchsorted(rows, np.arange(num_rows))[rows]
    ranked = np.full((num_rows, k), EMPTY, np.int32)
    first = place < k
    ranked[rows[first], place[first]] = columns[first]
    return ranked


def take_users(eval_set: EvalSet, rows: np.ndarray) -> EvalSet:
    """The same question for some of its users only; rows: int [M] into the eval set, in the order wanted."""
    events, offsets = _take(eval_set.offsets, rows)
    targets, target_offsets = _take(eval_set.target_offsets, rows)
    return EvalSet(
        users=eval_set.users[rows],
        offsets=offsets,
        items=eval_set.items[events],
        baskets=eval_set.baskets[events],
        target_offsets=target_offsets,
        targets=eval_set.targets[targets],
        num_items=eval_set.num_items,
        kind=eval_set.kind,
    )


def user_blocks(eval_set: EvalSet, size: int) -> Iterator[EvalSet]:
    """The eval set in blocks of at most `size` users, in order."""
    for start in range(0, len(eval_set), size):
        yield take_users(eval_set, np.arange(start, min(start + size, len(eval_set))))


def history_rows(eval_set: EvalSet) -> np.ndarray:
    """int64 [E]: for each event of the histories, the row of the eval set it belongs to."""
    return np.repeat(np.arange(len(eval_set)), np.diff(eval_set.offsets))


def steps_back(offsets: np.ndarray) -> np.ndarray:
    """int64 [E]: how many events follow within the same row; the newest has 0."""
    return np.repeat(offsets[1:], np.diff(offsets)) - 1 - np.arange(offsets[-1])


def _take(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the chosen CSR rows, one after another, and their new offsets."""
    lengths = np.diff(offsets)[rows]
    new = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    positions = np.repeat(offsets[rows] - new[:-1], lengths) + np.arange(new[-1])
    return positions, new
