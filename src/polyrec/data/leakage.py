"""Ways in which an evaluation can know the future: reported with counts, never mended silently.

The same event on both sides of a split; equal times on both sides of a user's boundary, whose order is a guess; ids
whose order tells the order of time, so that ties broken by id, or events of one moment sorted by id, help every method.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from scipy.stats import spearmanr

from .dataset import Dataset, natural_rank
from .histories import FIT, TEST, VALIDATION, Histories, event_owners
from .report import Notice

CORRELATED = 0.8  # a rank correlation that age alone does not explain; Online Retail's stock codes have 0.35
ASCENDING = 0.75  # share of steps from a lower to a higher id; half by chance
FEWEST = 100  # steps or ids below which such shares say nothing


def check_leakage(dataset: Dataset, histories: Histories) -> list[Notice]:
    """Warnings about `histories`, made by `to_histories` from `dataset` (the same events, one to one)."""
    assert len(histories.items) == dataset.events.height
    events = dataset.events.with_columns(
        pl.Series("split", histories.split),
        pl.Series("owner", event_owners(histories.offsets)),
        pl.Series("ordinal", histories.baskets),
    )
    found: list[Notice | None] = [shared_events(events), *boundary_ties(events), *id_order(dataset)]
    if dataset.kind == "sequence":
        found.append(tied_id_order(events))
    return [notice for notice in found if notice is not None and notice.count]


def shared_events(events: pl.DataFrame) -> Notice:
    """Events (user, item, time) with more than one label in `split`. Without times, repeats cannot be told apart."""
    timed = events.filter(pl.col("time").is_not_null() & (pl.col("split") >= FIT))
    shared = timed.group_by("user", "item", "time").agg(pl.col("split").n_unique()).filter(pl.col("split") > 1)
    return Notice("leak_same_event", shared.height, "events (user, item, time) that are in two splits")


def boundary_ties(events: pl.DataFrame) -> list[Notice]:
    """Users whose first validation (or test) event has the very time of the event before it."""
    notices = []
    for label, name in ((VALIDATION, "validation"), (TEST, "test")):
        before = pl.col("time").filter((pl.col("split") >= FIT) & (pl.col("split") < label)).max()
        after = pl.col("time").filter(pl.col("split") == label).min()
        tied = events.group_by("owner").agg(before.alias("before"), after.alias("after"))
        count = tied.filter(pl.col("before") >= pl.col("after")).height
        message = f"users with the last event before {name} at the same time as the first of {name}: order is a guess"
        notices.append(Notice(f"leak_tie_{name}", count, message))
    return notices


def id_order(dataset: Dataset) -> list[Notice]:
    """Whether ids of items or users, in their natural order, follow the time (or the place) of their first event."""
    notices = []
    timed = dataset.events["time"].count() > 0
    for column in ("item", "user"):
        if column == "user" and not timed:
            continue  # without times, the order of users is that of the file
        when = pl.col("time").min() if timed else pl.col("place").mean()
        placed = dataset.events.with_columns(pl.int_range(pl.len()).over("user").alias("place"))
        firsts = placed.group_by(column).agg(when.alias("when"))
        if firsts.height < FEWEST or firsts["when"].n_unique() < 2:
            continue
        rho = float(spearmanr(natural_rank(firsts[column]).to_numpy(), firsts["when"].to_numpy()).statistic)
        if abs(rho) >= CORRELATED:
            message = f"{column} ids follow the time of their first event (rank correlation {rho:.2f})"
            notices.append(Notice(f"leak_{column}_id_order", firsts.height, message))
    # Baskets are stored in id order, so neighbours mean nothing there.
    ascending, steps = _ascending(dataset.events, tied=False) if dataset.kind == "sequence" else (0, 0)
    if steps >= FEWEST and ascending >= ASCENDING * steps:
        message = f"steps of {steps:,} in users' histories go to a higher item id: ids were given in the order of time"
        notices.append(Notice("leak_item_id_steps", ascending, message))
    return notices


def tied_id_order(events: pl.DataFrame) -> Notice | None:
    """Whether events of one user at one moment stand in the order of their ids."""
    ascending, steps = _ascending(events, tied=True)
    if steps < FEWEST or ascending < ASCENDING * steps:
        return None
    message = f"of {steps:,} pairs of equal user and time stand in id order: an order that time did not give"
    return Notice("leak_tie_id_order", ascending, message)


def _ascending(events: pl.DataFrame, *, tied: bool) -> tuple[int, int]:
    """How many steps between neighbouring events of a user go up in item id, and how many there are.

    tied: only steps within one time; else only steps through time. Steps to the same item never count.
    """
    same_user = (events["user"] == events["user"].shift()).fill_null(False).to_numpy()
    timed = events["time"].count() > 0
    if tied and not timed:
        return 0, 0
    if timed:
        equal = (events["time"] == events["time"].shift()).fill_null(False).to_numpy()
        same_user &= equal if tied else ~equal
    change = np.diff(natural_rank(events["item"]).to_numpy().astype(np.int64), prepend=0)
    steps = same_user & (change != 0)
    return int((change[steps] > 0).sum()), int(steps.sum())
