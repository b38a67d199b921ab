"""The methods every model stands beside: popularity, and item-to-item neighbours for sequences and for baskets.

All rank the whole catalog; ties go to the lower row. An item that no neighbour speaks for is not ranked (EMPTY).
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import scipy.sparse as sp

from ..core.config import Settings
from ..data.histories import EvalSet, Histories
from .ranking import history_rows, steps_back, top_k, user_blocks

_BLOCK = 256  # users scored at once: the dense block stays near 10 MB at 10,000 items


class Baseline(Protocol):
    """Fitted on histories, it ranks catalog rows for the users of an eval set."""

    def fit(self, histories: Histories) -> Baseline:
        """Learns from all events of `histories`; what may be known is the caller's choice (`known_before`)."""
        ...

    def rank(self, eval_set: EvalSet, k: int, mask_seen: bool) -> np.ndarray:
        """int32 [N, k] catalog rows, best first, EMPTY where nothing is left; mask_seen leaves the history out."""
        ...


class Popularity:
    """Items by how many events (one user's one basket counts an item once) they have."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.int64)

    def fit(self, histories: Histories) -> Popularity:
        """Counts events."""
        self._counts = item_counts(histories)
        return self

    def rank(self, eval_set: EvalSet, k: int, mask_seen: bool) -> np.ndarray:
        """See Baseline.rank; items without an event come last."""
        blocks = [np.zeros((0, k), np.int32)]
        for block in user_blocks(eval_set, _BLOCK):
            scores = np.tile(self._counts.astype(np.float32), (len(block), 1))
            blocks.append(_rank_block(scores, block, k, mask_seen, floor=-np.inf))
        return np.concatenate(blocks)


class SequenceKNNSettings(Settings):
    """window: steps between the two items of a pair. backward: weight of the later item pointing to the earlier.

    divide_by: whose popularity damps a pair. history: newest items that speak, with weight 1 / (1 + steps back).
    """

    window: int = 5
    backward: float = 0.5
    divide_by: Literal["candidate", "source"] = "candidate"
    history: int = 10


SEQUENCE_VARIANTS: dict[Literal["A", "B"], SequenceKNNSettings] = {
    "A": SequenceKNNSettings(),
    "B": SequenceKNNSettings(backward=0.0, divide_by="source"),
}


class SequenceItemKNN:
    """Neighbours in the order of events: a pair `gap` steps apart weighs 1 / gap."""

    def __init__(self, variant: Literal["A", "B"] = "A", settings: SequenceKNNSettings | None = None) -> None:
        self.settings = settings or SEQUENCE_VARIANTS[variant]
        self._weights = sp.csr_array((0, 0))

    def fit(self, histories: Histories) -> SequenceItemKNN:
        """Sums the pairs of every user."""
        owner = np.repeat(np.arange(histories.num_users), np.diff(histories.offsets))
        source, candidate, weight = [], [], []
        for gap in range(1, self.settings.window + 1):
            same = owner[:-gap] == owner[gap:]
            earlier, later = histories.items[:-gap][same], histories.items[gap:][same]
            source += [earlier, later]
            candidate += [later, earlier]
            weight += [np.full(len(earlier), 1 / gap), np.full(len(earlier), self.settings.backward / gap)]
        pairs = (np.concatenate(source), np.concatenate(candidate))
        shape = (histories.num_items, histories.num_items)
        weights = sp.csr_array((np.concatenate(weight), pairs), shape=shape)
        weights.eliminate_zeros()
        popularity = np.bincount(histories.items, minlength=histories.num_items)
        if self.settings.divide_by == "candidate":
            self._weights = (weights @ sp.diags_array(1 / np.sqrt(popularity + 1))).tocsr()
        else:  # a source without events has no pairs, so 1 in its place changes nothing
            self._weights = (sp.diags_array(1 / np.sqrt(np.maximum(popularity, 1))) @ weights).tocsr()
        return self

    def rank(self, eval_set: EvalSet, k: int, mask_seen: bool) -> np.ndarray:
        """See Baseline.rank."""
        back = steps_back(eval_set.offsets)
        weight = np.where(back < self.settings.history, 1 / (1.0 + back), 0.0)
        return _rank_neighbours(eval_set, weight, self._weights, k, mask_seen)


class BasketKNNSettings(Settings):
    """decay: weight of a basket per basket that followed it. shrinkage: added to both popularities of a pair.

    size_power: a basket of the history weighs size ** -size_power. repeat, repeat_decay: an item bought before gains,
    for every basket that held it, repeat * repeat_decay ** age * sqrt(the item's rebuy_share); 0 leaves
    the neighbours alone. Without it the method knows nothing of repeats; it has no effect where bought items are masked.
    """

    decay: float = 0.8
    shrinkage: float = 2.0
    size_power: float = 0.5
    repeat: float = 0.4
    repeat_decay: float = 0.9


class BasketItemKNN:
    """Neighbours in the same basket: a basket of `size` items gives each of its pairs 1 / log2(1 + size)."""

    def __init__(self, settings: BasketKNNSettings | None = None) -> None:
        self.settings = settings or BasketKNNSettings()
        self._weights = sp.csr_array((0, 0))
        self._rebought = np.zeros(0)

    def fit(self, histories: Histories) -> BasketItemKNN:
        """Sums the pairs of every basket; an item's similarity with itself is zero."""
        baskets = basket_matrix(histories)
        size = np.diff(baskets.indptr)
        weights = (baskets.T @ (sp.diags_array(1 / np.log2(1.0 + size)) @ baskets)).tocoo()
        row, column = weights.coords
        popularity = np.asarray(baskets.sum(axis=0)).ravel() + self.settings.shrinkage
        values = weights.data / np.sqrt(popularity[row] * popularity[column])
        self._rebought = rebuy_share(histories)
        other = row != column
        self._weights = sp.csr_array((values[other], (row[other], column[other])), shape=weights.shape)
        return self

    def rank(self, eval_set: EvalSet, k: int, mask_seen: bool) -> np.ndarray:
        """See Baseline.rank."""
        _, size = _basket_runs(history_rows(eval_set), eval_set.baskets)
        newest = eval_set.baskets[eval_set.offsets[1:] - 1] if len(eval_set) else eval_set.baskets
        age = (np.repeat(newest, np.diff(eval_set.offsets)) - eval_set.baskets).astype(np.float64)
        weight = self.settings.decay**age / np.repeat(size, size) ** self.settings.size_power
        own = self.settings.repeat * self.settings.repeat_decay**age * np.sqrt(self._rebought[eval_set.items])
        return _rank_neighbours(eval_set, weight, self._weights, k, mask_seen, None if mask_seen else own)


def item_counts(histories: Histories) -> np.ndarray:
    """int64 [num_items]: events of each item."""
    return np.bincount(histories.items, minlength=histories.num_items).astype(np.int64)


def rebuy_share(histories: Histories) -> np.ndarray:
    """float64 [num_items]: purchases after a buyer's first, per buyer, smoothed by 2 such purchases and 4 buyers."""
    owner = np.repeat(np.arange(histories.num_users, dtype=np.int64), np.diff(histories.offsets))
    pairs = np.unique(owner * histories.num_items + histories.items)
    buyers = np.bincount(pairs % histories.num_items, minlength=histories.num_items)
    return (item_counts(histories) - buyers + 2) / (buyers + 4)


def basket_matrix(histories: Histories) -> sp.csr_array:
    """float64 [baskets, num_items]: 1 where a basket holds an item, however often."""
    owner = np.repeat(np.arange(histories.num_users), np.diff(histories.offsets))
    _, size = _basket_runs(owner, histories.baskets)
    offsets = np.concatenate([[0], np.cumsum(size)])
    ones = np.ones(len(histories.items))
    matrix = sp.csr_array((ones, histories.items, offsets), shape=(len(size), histories.num_items))
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return matrix


def _basket_runs(owner: np.ndarray, baskets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each basket starts among the events, and how many events it has."""
    if not len(owner):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    change = np.flatnonzero((owner[1:] != owner[:-1]) | (baskets[1:] != baskets[:-1])) + 1
    starts = np.concatenate([[0], change])
    return starts, np.diff(np.concatenate([starts, [len(owner)]]))


def _rank_neighbours(
    eval_set: EvalSet,
    weight: np.ndarray,
    weights: sp.csr_array,
    k: int,
    mask_seen: bool,
    own: np.ndarray | None = None,
) -> np.ndarray:
    """Ranks by the sum of `weight` [E] times the neighbour weights [I, I] of each history item, plus its `own` [E]."""
    history = sp.csr_array((weight, eval_set.items, eval_set.offsets), shape=(len(eval_set), eval_set.num_items))
    blocks = [np.zeros((0, k), np.int32)]
    for number, block in enumerate(user_blocks(eval_set, _BLOCK)):
        scores = (history[number * _BLOCK : number * _BLOCK + len(block)] @ weights).toarray()
        if own is not None:
            part = slice(history.indptr[number * _BLOCK], history.indptr[number * _BLOCK + len(block)])
            np.add.at(scores, (history_rows(block), block.items), own[part])
        blocks.append(_rank_block(scores, block, k, mask_seen, floor=0.0))
    return np.concatenate(blocks)


def _rank_block(scores: np.ndarray, block: EvalSet, k: int, mask_seen: bool, floor: float) -> np.ndarray:
    if mask_seen:
        scores[history_rows(block), block.items] = -np.inf
    return top_k(scores, k, floor)
