"""Histories as compact arrays: what training, evaluation and the baselines read. Imports no torch.

A history is a list of baskets in time order. Data without baskets is the special case in which each event is a
basket of its own, so one representation serves both and "leave the last basket out" is "leave one out".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["sequence", "basket"]
FIT, VALIDATION, TEST, UNUSED = 0, 1, 2, -1
Stage = Literal["validation", "test"]


@dataclass(frozen=True, eq=False)
class Histories:
    """Events of all users, CSR by user, oldest first.

    users: [U] user ids. offsets: int64 [U + 1] into the event arrays.
    items: int32 [E] rows of the catalog. baskets: int32 [E] ordinal of the basket within its user, from 0,
    non-decreasing.
    split: int8 [E], one of FIT, VALIDATION, TEST, UNUSED. kind: whether order inside a basket means nothing.
    """

    users: list[str]
    offsets: np.ndarray
    items: np.ndarray
    baskets: np.ndarray
    split: np.ndarray
    num_items: int
    kind: Kind

    @property
    def num_users(self) -> int:
        return len(self.users)


@dataclass(frozen=True, eq=False)
class EvalSet:
    """What one stage asks: each row a user with a history and the items that followed.

    users: int64 [N] rows of Histories.users. items, baskets: int32 CSR by `offsets` int64 [N + 1]: the histories.
    targets: int32 CSR by `target_offsets` int64 [N + 1], distinct within a row.
    """

    users: np.ndarray
    offsets: np.ndarray
    items: np.ndarray
    baskets: np.ndarray
    target_offsets: np.ndarray
    targets: np.ndarray
    num_items: int
    kind: Kind

    def __len__(self) -> int:
        return len(self.users)

    def history(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Item rows int32 [H] and basket ordinals int32 [H] of one history, oldest first."""
        part = slice(self.offsets[row], self.offsets[row + 1])
        return self.items[part], self.baskets[part]

    def target(self, row: int) -> np.ndarray:
        """Target item rows int32 [G] of one user."""
        return self.targets[self.target_offsets[row] : self.target_offsets[row + 1]]


def select_events(histories: Histories, keep: np.ndarray) -> Histories:
    """The same users with only the events where `keep` (bool [E]) holds."""
    counts = np.bincount(event_owners(histories.offsets)[keep], minlength=histories.num_users)
    return Histories(
        users=histories.users,
        offsets=_offsets(counts),
        items=histories.items[keep],
        baskets=histories.baskets[keep],
        split=histories.split[keep],
        num_items=histories.num_items,
        kind=histories.kind,
    )


def known_before(histories: Histories, stage: Stage) -> Histories:
    """The events a model may have seen before `stage`: fit events, and for the test also validation."""
    limit = VALIDATION if stage == "validation" else TEST
    return select_events(histories, (histories.split >= FIT) & (histories.split < limit))


def eval_set(histories: Histories, stage: Stage, *, only_new: bool = False) -> EvalSet:
    """The users with a non-empty history before `stage` and at least one target in it.

    only_new: targets already in the history leave, and with them users without any other (protocol «new»).
    """
    label = VALIDATION if stage == "validation" else TEST
    owner = event_owners(histories.offsets)
    past = (histories.split >= FIT) & (histories.split < label)
    targets = np.unique(_pair_keys(owner, histories, histories.split == label))
    if only_new:
        targets = np.setdiff1d(targets, _pair_keys(owner, histories, past), assume_unique=False)
    target_owner = targets // max(histories.num_items, 1)
    num_past = np.bincount(owner[past], minlength=histories.num_users)
    num_targets = np.bincount(target_owner, minlength=histories.num_users)
    asked = (num_past > 0) & (num_targets > 0)
    past &= asked[owner]
    targets = targets[asked[target_owner]]
    return EvalSet(
        users=np.flatnonzero(asked),
        offsets=_offsets(num_past[asked]),
        items=histories.items[past],
        baskets=histories.baskets[past],
        target_offsets=_offsets(num_targets[asked]),
        targets=(targets % max(histories.num_items, 1)).astype(np.int32),
        num_items=histories.num_items,
        kind=histories.kind,
    )


def event_owners(offsets: np.ndarray) -> np.ndarray:
    """int64 [E]: the row of the user that each event belongs to."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _pair_keys(owner: np.ndarray, histories: Histories, events: np.ndarray) -> np.ndarray:
    """int64: one number per (user, item) pair of the chosen events, ordered as the pairs are."""
    return owner[events] * histories.num_items + histories.items[events]


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
