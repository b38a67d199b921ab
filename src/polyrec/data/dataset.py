"""A cleaned data set: events and items as text ids, their order, what was dropped, and a digest. Imports no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from ..core.errors import DataError
from .columns import BASKET, ITEM, NAME, TEXT, TIME, USER, ColumnMap, find_column, need_column, plain
from .histories import Kind
from .readers import Format, collect, columns_of, read_table
from .report import ROW, DataReport, ReportBuilder
from .times import to_microseconds

__all__ = ["ColumnMap", "Dataset", "assemble", "load_dataset", "load_online_retail"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """events: user, item (String), time (Int64 µs since 1970, all null without a time column), basket (String, all null
    without baskets); the events of a user stand together, oldest first, and inside a basket by item id.
    items: item, name, text (String; the last two may be null), in catalog order: as in the item file, else by id.
    kind: «basket» when some basket holds several items. digest: SHA-256 of events, items and kind.
    """

    events: pl.DataFrame
    items: pl.DataFrame
    kind: Kind
    report: DataReport
    digest: str


def load_online_retail(strict: bool = False) -> Dataset:
    """The bundled UCI Online Retail data (datasets/online_retail.py)."""
    from .datasets import online_retail

    return online_retail.load_online_retail(strict)


def load_dataset(
    events_path: str | Path,
    items_path: str | Path | None = None,
    columns: ColumnMap | None = None,
    strict: bool = False,
    *,
    format: Format = "auto",
    items_format: Format = "auto",
    encoding: str = "utf-8",
    time_format: str | None = None,
    min_user_events: int = 2,
) -> Dataset:
    """Reads, checks and cleans events and, if given, the item table.

    Rows that cannot be used (null ids, unparsable times, duplicates, items missing in the item table, users with fewer
    than `min_user_events` events) are dropped and counted in the report; `strict` makes any drop a DataError.
    Without an item table the items are those of the events, without names.
    """
    columns = columns or ColumnMap()
    report = ReportBuilder(Path(events_path).name)
    events = _read_events(Path(events_path), columns, report, format, encoding, time_format)
    items = None if items_path is None else _read_items(Path(items_path), columns, report, items_format, encoding)
    if items is not None:
        unknown = ~pl.col("item").is_in(items["item"].to_list())
        events = report.drop(events, unknown, "unknown_item", f"item not in {Path(items_path or '').name}", "item")
    events = _drop_duplicates(events, report)
    few = pl.len().over("user") < min_user_events
    fewest = "a single event" if min_user_events == 2 else f"fewer than {min_user_events} events"
    events = report.drop(events, few, "short_user", f"event of a user with {fewest}", "user")
    if items is None:
        ids = events.select(pl.col("item").unique())
        items = ids.with_columns(pl.lit(None, pl.String).alias("name"), pl.lit(None, pl.String).alias("text"))
        items = items.sort(natural_rank(items["item"]))
    return assemble(events, items, report, strict=strict)


def assemble(events: pl.DataFrame, items: pl.DataFrame, report: ReportBuilder, *, strict: bool) -> Dataset:
    """A Dataset of clean events (user, item, time, basket, row) and items (item, name, text); sorts and sums up.

    Order: by basket, a basket's time being its earliest, equal times by basket id (numbers as numbers); data without
    baskets by time, equal times as in the file.
    """
    if strict:
        report.refuse_drops()
    if not events.height:
        why = "; ".join(map(str, report.drops)) or "the file has no rows"
        raise DataError("no_events", f"{report.source}: no event is left ({why}).", "Check the file and the columns.")
    sizes = events.group_by("user", "basket").len() if events["basket"].count() else events.head(0)
    kind: Kind = "basket" if sizes.height and int(sizes["len"].max()) > 1 else "sequence"  # type: ignore[arg-type]
    events = _in_order(events, kind).select("user", "item", "time", "basket")
    if sizes.height:
        times = events.group_by("user", "basket").agg(pl.col("time").n_unique())
        many = times.filter(pl.col("time") > 1).height
        report.warn("basket_times", many, "baskets with several times: the earliest counts")
        shared = sizes.height - sizes["basket"].n_unique()
        report.warn("basket_shared", shared, "basket ids that further users have too: taken as baskets of their own")
    seen = events["item"].n_unique()
    report.warn("cold_items", items.height - seen, "items without an event")
    facts = DataReport(
        source=report.source,
        rows_read=report.rows_read,
        num_events=events.height,
        num_users=events["user"].n_unique(),
        num_items=items.height,
        num_baskets=sizes.height,
        columns=dict(report.columns),
        cleaning=tuple(report.cleaning),
        drops=tuple(report.drops),
        warnings=tuple(report.warnings),
    )
    return Dataset(events, items, kind, facts, _digest(events, items, kind))


def natural_rank(ids: pl.Series) -> pl.Series:
    """Sort keys of ids: numbers as numbers when all are whole numbers, else as text. UInt32, equal ids equal keys."""
    known = ids.unique().drop_nulls().to_frame("id")
    by_number = bool(known["id"].str.contains(r"^\d+$").all())
    known = known.sort(pl.col("id").str.len_chars(), "id") if by_number else known.sort("id")
    return ids.to_frame("id").join(known.with_row_index("rank"), on="id", how="left", maintain_order="left")["rank"]


def _read_events(
    path: Path, columns: ColumnMap, report: ReportBuilder, format: Format, encoding: str, time_format: str | None
) -> pl.DataFrame:
    table = read_table(path, format=format, encoding=encoding)
    present = columns_of(table, path)
    found = {
        "user": need_column(columns.user, present, "user", "--user-column", USER, path.name),
        "item": need_column(columns.item, present, "item", "--item-column", ITEM, path.name),
        "time": find_column(columns.time, present, "time", "--time-column", TIME, path.name),
        "basket": find_column(columns.basket, present, "basket", "--basket-column", BASKET, path.name),
    }
    report.columns = {role: name for role, name in found.items() if name is not None}
    wanted = table.select(pl.col(name).alias(role) for role, name in report.columns.items())
    raw = collect(wanted.with_row_index(ROW, offset=1), path)
    report.rows_read = raw.height
    if not raw.height:
        raise DataError("file_empty", f"{path} has a header but no rows.", "Give a file with events.")
    events = raw.select(
        as_ids(raw["user"], path, report.columns["user"]),
        as_ids(raw["item"], path, report.columns["item"]),
        raw["time"].alias("time") if "time" in raw.columns else pl.lit(None, pl.Int64).alias("time"),
        as_ids(raw["basket"], path, report.columns["basket"])
        if "basket" in raw.columns
        else pl.lit(None, pl.String).alias("basket"),
        ROW,
    )
    events = report.drop(events, pl.col("user").is_null(), "null_user", "row without a user", "item")
    events = report.drop(events, pl.col("item").is_null(), "null_item", "row without an item", "user")
    if "basket" in report.columns:
        events = report.drop(events, pl.col("basket").is_null(), "null_basket", "row without a basket", "user")
    if "time" in report.columns and events.height:
        events = _parse_times(events, report, path, time_format)
    elif columns.time is None and format != "sequence":  # sequence files state their order
        message = f"events without a time ({path.name} has no column known as one, see --time-column): row order counts"
        report.warn("no_time_column", events.height, message)
    return events


def _parse_times(events: pl.DataFrame, report: ReportBuilder, path: Path, time_format: str | None) -> pl.DataFrame:
    events = report.drop(events, pl.col("time").is_null(), "null_time", "row without a time", "user")
    where = f"{path.name}, column '{report.columns['time']}'"
    parsed = to_microseconds(events["time"], where, time_format)
    if events.height and not parsed.count():
        raise DataError(
            "time_unparsable",
            f"{where}: no value is a time, the first is {events['time'][0]!r} in row {events[ROW][0]}.",
            "Say how they are written (--time-format '%d/%m/%Y %H:%M'), or name another --time-column.",
        )
    events = events.with_columns(parsed.alias("parsed"))
    events = report.drop(events, pl.col("parsed").is_null(), "unparsable_time", "time that cannot be parsed", "time")
    return events.with_columns(pl.col("parsed").alias("time")).drop("parsed")


def _drop_duplicates(events: pl.DataFrame, report: ReportBuilder) -> pl.DataFrame:
    """One event per user, basket and item; without baskets one per user, item and time; without times all stay."""
    if events["basket"].count():
        again = ~pl.struct("user", "basket", "item").is_first_distinct()
        # The earliest line of an item in its basket stays.
        events = events.sort("time", ROW, nulls_last=True)
        return report.drop(events, again, "duplicate", "further row of an item in one basket", "item").sort(ROW)
    if events["time"].count():
        again = ~pl.struct("user", "item", "time").is_first_distinct()
        return report.drop(events, again, "duplicate", "further row of one user, item and time", "item")
    return events


def _read_items(path: Path, columns: ColumnMap, report: ReportBuilder, format: Format, encoding: str) -> pl.DataFrame:
    table = read_table(path, format=format, encoding=encoding)
    present = columns_of(table, path)
    item = need_column(columns.item_id, present, "item id", "--item-id-column", ITEM, path.name)
    others = [name for name in present if name != item]
    name = find_column(columns.name, others, "item's name", "--name-column", NAME, path.name)
    text = [
        find_column(each, others, "item's text", "--text-column", (), path.name)
        for each in columns.text or (name for name in others if plain(name) in TEXT)
    ]
    report.columns |= {"item_id": item, "name": name or "", "text": " ".join(filter(None, text))}
    wanted = list(dict.fromkeys([item, *filter(None, [name, *text])]))
    raw = collect(table.select(wanted).with_row_index(ROW, offset=1), path)
    if not raw.height:
        raise DataError("file_empty", f"{path} has a header but no rows.", "Give a file with items.")
    words = [as_text(raw[each]).alias(f"text_{i}") for i, each in enumerate(filter(None, text))]
    joined = pl.concat_str(words, separator=" ", ignore_nulls=True) if words else pl.lit(None, pl.String)
    items = raw.select(
        as_ids(raw[item], path, item).alias("item"),
        (as_text(raw[name]) if name else pl.lit(None, pl.String)).alias("name"),
        joined.alias("text"),
        ROW,
    ).with_columns(pl.when(pl.col("text") != "").then(pl.col("text")).alias("text"))
    items = report.drop(items, pl.col("item").is_null(), "null_item_id", f"row of {path.name} without an item id")
    again = ~pl.col("item").is_first_distinct()
    items = report.drop(items, again, "duplicate_item", f"further row of an item in {path.name}", "item")
    return items.drop(ROW)


def as_ids(values: pl.Series, path: Path, column: str) -> pl.Series:
    """Ids as text, stripped, empty as null; whole numbers that were written as 17850.0 lose the fraction."""
    if values.dtype.is_nested():
        raise DataError("id_nested", f"{path}: column '{column}' holds {values.dtype}, not ids.", "Flatten it.")
    if values.dtype.is_float():
        values = values.fill_nan(None)
        whole = values.cast(pl.Int64, strict=False)
        values = whole if bool((whole.cast(values.dtype) == values).all()) else values
    text = values.cast(pl.String, strict=False).str.strip_chars()
    text = text.to_frame("x").select(pl.when(pl.col("x") != "").then(pl.col("x"))).to_series()
    if text.count() and bool(text.str.contains(r"^-?\d+\.0$").all()):
        text = text.str.strip_suffix(".0")
    return text.alias(values.name)


def as_text(values: pl.Series) -> pl.Series:
    """Text for reading: lists joined by spaces, white space runs as one space, empty as null."""
    if isinstance(values.dtype, pl.List):
        inner = values.dtype.inner
        values = values.cast(pl.List(pl.String), strict=False).list.join(" ") if not inner.is_nested() else values
    if values.dtype.is_nested():
        return pl.Series(values.name, [None if v is None else str(v) for v in values.to_list()], dtype=pl.String)
    text = values.cast(pl.String, strict=False).str.replace_all(r"\s+", " ").str.strip_chars()
    return text.to_frame("x").select(pl.when(pl.col("x") != "").then(pl.col("x"))).to_series().alias(values.name)


def _in_order(events: pl.DataFrame, kind: Kind) -> pl.DataFrame:
    events = events.with_columns(natural_rank(events["user"]).alias("user_rank"))
    if kind == "sequence":
        return events.sort("user_rank", "time", ROW)
    started = pl.col("time").min() if events["time"].count() else pl.col(ROW).min()
    return events.with_columns(
        started.over("user", "basket").alias("started"), natural_rank(events["basket"]).alias("basket_rank")
    ).sort("user_rank", "started", "basket_rank", "item")


def _digest(events: pl.DataFrame, items: pl.DataFrame, kind: Kind) -> str:
    digest = hashlib.sha256(kind.encode())
    for table in (events, items):
        for part in table.iter_slices(1 << 18):
            digest.update(part.write_csv(include_header=False, quote_style="always").encode())
        digest.update(b"\0")
    return digest.hexdigest()
