"""From a cleaned data set to histories (catalog rows, basket ordinals, split labels), to disk and back. No torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from ..core.errors import DataError
from ..core.files import atomic_path, read_json, write_json
from .dataset import Dataset
from .histories import Histories, Kind, event_owners
from .splits import Split, label_by_time, label_last, time_boundaries

INTERACTIONS, FACTS = "interactions.parquet", "histories.json"


def to_histories(
    dataset: Dataset,
    item_order: list[str],
    split: Split = "auto",
    *,
    quantiles: tuple[float, float] = (0.8, 0.9),
    boundaries: tuple[int, int] | None = None,
) -> Histories:
    """The events of `dataset` in their order, one to one, as rows of `item_order`, with split labels.

    split: `auto` is `basket` where baskets of several items exist, else `leave-one-out`. `time` starts validation and
    test at `boundaries` (µs) or at these quantiles of the event times. Errors: DataError.
    """
    events = dataset.events
    kind: Kind = dataset.kind
    if split == "auto":
        split = "basket" if kind == "basket" else "leave-one-out"
    if split == "basket" and kind != "basket":
        raise DataError(
            "split_no_baskets",
            f"Split 'basket' needs baskets of several items; {dataset.report.source} has none.",
            "Name the basket column (--basket-column), or use split 'leave-one-out'.",
        )
    if split == "leave-one-out":
        kind = "sequence"  # every event stands alone
    items = _item_rows(events["item"], item_order)
    users, offsets = _user_offsets(events["user"])
    baskets = _ordinals(events, offsets, kind)
    if split == "time":
        times = _basket_times(events, baskets, offsets)
        labels = label_by_time(times, *(boundaries or time_boundaries(times, quantiles)))
    elif split in ("basket", "leave-one-out"):
        labels = label_last(baskets, offsets, fewest=2 if split == "basket" else 3)
    else:
        raise DataError("split_unknown", f"Unknown split '{split}'.", "Use auto, leave-one-out, basket or time.")
    return Histories(users, offsets, items, baskets, labels, len(item_order), kind)


def save_histories(folder: str | Path, histories: Histories) -> None:
    """Writes interactions.parquet (one row a user, list columns) and histories.json into `folder`."""
    owner = event_owners(histories.offsets)
    events = pl.DataFrame(
        {"row": owner, "items": histories.items, "baskets": histories.baskets, "split": histories.split}
    )
    lists = events.group_by("row", maintain_order=True).agg("items", "baskets", "split")
    users = pl.DataFrame({"user": histories.users}, schema={"user": pl.String}).with_row_index("row")
    frame = users.with_columns(pl.col("row").cast(lists.schema["row"])).join(
        lists, on="row", how="left", maintain_order="left"
    )
    with atomic_path(Path(folder) / INTERACTIONS) as temporary:
        frame.drop("row").write_parquet(temporary)
    facts = {"num_users": histories.num_users, "num_items": histories.num_items, "kind": histories.kind}
    write_json(Path(folder) / FACTS, facts)


def load_histories(folder: str | Path) -> Histories:
    """Reads what `save_histories` wrote. Errors: DataError when a file is missing, broken or does not fit the other."""
    folder = Path(folder)
    for name in (INTERACTIONS, FACTS):
        if not (folder / name).is_file():
            raise DataError("prepared_incomplete", f"{folder / name} is missing.", "Run `polyrec prepare` again.")
    facts = read_json(folder / FACTS)
    try:
        frame = pl.read_parquet(folder / INTERACTIONS)
        users = frame["user"].to_list()
        sizes = frame["items"].list.len().fill_null(0).to_numpy()
        flat = {name: _flat(frame[name]) for name in ("items", "baskets", "split")}
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            "prepared_broken", f"{folder / INTERACTIONS} cannot be read: {error}.", "Run `polyrec prepare` again."
        ) from error
    if facts.get("num_users") != len(users):
        raise DataError(
            "prepared_broken",
            f"{folder}: {FACTS} says {facts.get('num_users')} users, {INTERACTIONS} holds {len(users)}.",
            "Run `polyrec prepare` again.",
        )
    return Histories(
        users=users,
        offsets=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64),
        items=flat["items"].astype(np.int32),
        baskets=flat["baskets"].astype(np.int32),
        split=flat["split"].astype(np.int8),
        num_items=facts["num_items"],
        kind=facts["kind"],
    )


def _flat(lists: pl.Series) -> np.ndarray:
    return lists.filter(lists.list.len() > 0).explode().to_numpy()


def _item_rows(items: pl.Series, item_order: list[str]) -> np.ndarray:
    """int32 [E] rows in `item_order`."""
    order = pl.DataFrame({"item": item_order}, schema={"item": pl.String}).with_row_index("at")
    if order["item"].n_unique() != order.height:
        twice = order.filter(pl.col("item").is_duplicated())["item"][0]
        raise DataError("item_twice", f"Item '{twice}' stands twice in the catalog's order.", "Keep one of them.")
    rows = items.to_frame("item").join(order, on="item", how="left", maintain_order="left")
    missing = rows.filter(pl.col("at").is_null())
    if missing.height:
        raise DataError(
            "item_not_in_catalog",
            f"{missing.height:,} events name items that the catalog lacks, the first '{missing['item'][0]}'.",
            "Prepare the catalog from this data set, or filter the events.",
        )
    return rows["at"].to_numpy().astype(np.int32)


def _user_offsets(users: pl.Series) -> tuple[list[str], np.ndarray]:
    """Users in the order of their events, and int64 [U + 1] offsets; the events of a user stand together."""
    runs = users.rle().struct.unnest()
    return runs["value"].to_list(), np.concatenate([[0], np.cumsum(runs["len"].to_numpy(), dtype=np.int64)])


def _ordinals(events: pl.DataFrame, offsets: np.ndarray, kind: Kind) -> np.ndarray:
    """int32 [E]: the how-manieth basket of its user an event is in."""
    if kind == "sequence":
        starts = np.arange(events.height, dtype=np.int64)
    else:
        starts = events.select(pl.struct("user", "basket").rle_id().cast(pl.Int64)).to_series().to_numpy()
    first = starts[offsets[:-1]] if events.height else starts
    return (starts - np.repeat(first, np.diff(offsets))).astype(np.int32)


def _basket_times(events: pl.DataFrame, baskets: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """int64 [E] µs: the earliest time of the event's basket."""
    if events["time"].null_count():
        raise DataError(
            "split_no_time", "Split 'time' needs a time for every event.", "Name the time column (--time-column)."
        )
    owner = event_owners(offsets)
    starts = np.flatnonzero(np.diff(owner, prepend=-1) | np.diff(baskets, prepend=-1))
    earliest = np.minimum.reduceat(events["time"].to_numpy(), starts)
    return np.repeat(earliest, np.diff(np.append(starts, events.height)))
