"""Histories of many users from one file: a row a user with a `history`, or an event table that is grouped by user.

Event tables are read and cleaned exactly as `polyrec prepare` does (data/dataset.py), so that a user's history looks as it
did in training; they need sorting and are held in memory as columns. Rows with a `history` are read piece by piece.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import polars as pl

from ..core.errors import DataError
from ..data.columns import USER, ColumnMap, need_column
from ..data.dataset import load_dataset
from ..data.readers import UNREADABLE, Format, collect, columns_of, detect_format, read_table
from ..data.report import DataReport

HISTORY = "history"
SLICE = 8192  # rows of a table that become Python objects at a time

Entry = str | list[str]


@dataclass(frozen=True)
class UserHistory:
    """One user: oldest first, an entry is an item id or SID, or a list of them (one basket)."""

    user: str
    history: list[Entry]


@dataclass(frozen=True, eq=False)
class HistorySource:
    """num_users: how many `users` will give. report: what cleaning an event table dropped; None for ready histories."""

    num_users: int
    users: Iterator[UserHistory]
    report: DataReport | None


def open_histories(
    path: str | Path,
    columns: ColumnMap | None = None,
    *,
    format: Format = "auto",
    encoding: str = "utf-8",
    time_format: str | None = None,
) -> HistorySource:
    """A column named `history` makes each row a user (unless `columns.item` is named); all other tables are events.

    In JSONL and Parquet a history is a list of ids, or of lists of ids (baskets); in CSV it is text as `parse_baskets`
    reads it. Errors: DataError, with the line or row.
    """
    path, columns = Path(path), columns or ColumnMap()
    kind = detect_format(path, format)
    if columns.item is None and kind == "jsonl":
        first = next(_json_lines(path, encoding), None)
        if first is None:
            raise DataError("file_empty", f"{path} holds nothing but blank lines.", "Give a file with rows.")
        if HISTORY in first[1]:
            user = _user_column(columns, list(first[1]), path)
            return HistorySource(_count_lines(path), _from_json(path, encoding, user), None)
    elif columns.item is None and kind in ("parquet", "csv", "tsv"):
        table = read_table(path, format=format, encoding=encoding)
        present = columns_of(table, path)
        if HISTORY in present:
            user = _user_column(columns, present, path)
            table = table.select(pl.col(user).alias("user"), pl.col(HISTORY))
            if kind != "parquet":
                table = collect(table, path).lazy()  # a text file would be read anew for each slice
            num_users = int(collect(table.select(pl.len()), path).item())
            return HistorySource(num_users, _from_table(table, num_users, path), None)
    data = load_dataset(
        path, columns=columns, format=format, encoding=encoding, time_format=time_format, min_user_events=1
    )
    return HistorySource(data.report.num_users, _from_events(data.events, data.kind == "basket"), data.report)


def parse_baskets(text: str) -> list[Entry]:
    """`a,b;c` -> [[a, b], c]: semicolons separate baskets, oldest first, commas the items of one. Blank gives []."""
    history: list[Entry] = []
    for part in text.split(";"):
        items = [item.strip() for item in part.split(",") if item.strip()]
        if items:
            history.append(items if len(items) > 1 else items[0])
    return history


def _user_column(columns: ColumnMap, present: list[str], path: Path) -> str:
    others = [name for name in present if name != HISTORY]
    return need_column(columns.user, others, "user", "--user-column", USER, path.name)


def _from_events(events: pl.DataFrame, in_baskets: bool) -> Iterator[UserHistory]:
    """events: sorted as `Dataset.events`, a user's together."""
    users = events.group_by("user", maintain_order=True).agg("item", "basket")
    for part in users.iter_slices(SLICE):
        for user, items, baskets in part.iter_rows():
            history: list[Entry] = list(items)
            if in_baskets:
                pairs = groupby(zip(baskets, items, strict=True), key=lambda pair: pair[0])
                history = [[item for _, item in pair] for _, pair in pairs]
            yield UserHistory(user, history)


def _from_table(table: pl.LazyFrame, num_users: int, path: Path) -> Iterator[UserHistory]:
    for start in range(0, num_users, SLICE):
        for row, (user, history) in enumerate(collect(table.slice(start, SLICE), path).iter_rows(), start + 1):
            where = f"{path.name}, row {row}"
            if isinstance(history, str):
                history = parse_baskets(history)
            yield UserHistory(_id(user, where, "user"), _history(history, where))


def _from_json(path: Path, encoding: str, user: str) -> Iterator[UserHistory]:
    for number, row in _json_lines(path, encoding):
        where = f"{path.name}, line {number}"
        for key in (user, HISTORY):
            if key not in row:
                raise DataError("key_missing", f"{where} has no '{key}'.", "Give each line both, as the first has.")
        yield UserHistory(_id(row[user], where, "user"), _history(row[HISTORY], where))


def _history(value: Any, where: str) -> list[Entry]:
    """Checks one history; None is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise DataError(
            "history_invalid",
            f"{where}: the history is {value!r}, not a list.",
            'Write it as ["a", "b"], or with baskets as [["a", "b"], ["c"]].',
        )
    return [
        [_id(item, where, "item") for item in entry] if isinstance(entry, list) else _id(entry, where, "item")
        for entry in value
    ]


def _id(value: Any, where: str, role: str) -> str:
    """An id as text, as `data.dataset.as_ids` writes it: stripped, and 17850.0 without its fraction."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not text:
        raise DataError("id_invalid", f"{where}: {value!r} is no {role} id.", "Ids are text or whole numbers.")
    return text


def _json_lines(path: Path, encoding: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank."""
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding=encoding) as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                row = json.loads(line.removeprefix("\ufeff"))
                if not isinstance(row, dict):
                    raise DataError("file_broken", f"{path}, line {number} is not a JSON object.", "Mend the line.")
                yield number, row
    except json.JSONDecodeError as fault:
        place = f"line {number} is not valid JSON ({fault.msg} at column {fault.colno})"
        raise DataError("file_broken", f"{path} cannot be read: {place}.", "Mend the line.") from fault
    except UnicodeDecodeError as fault:
        raise DataError(
            "not_" + encoding.lower().replace("-", ""),
            f"{path} is not {encoding.upper()}: byte 0x{fault.object[fault.start]:02x} after line {number}.",
            "Convert the file, or name its encoding: --encoding latin-1 (or utf-16, cp1252, …).",
        ) from fault
    except LookupError as fault:
        raise DataError(
            "encoding_unknown", f"Unknown encoding '{encoding}'.", "E.g. utf-8, latin-1, utf-16."
        ) from fault
    except UNREADABLE as fault:
        raise DataError("file_broken", f"{path} cannot be read: {fault}.", "Mend the file.") from fault


def _count_lines(path: Path) -> int:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as stream:
            return sum(1 for line in stream if line.strip())
    except UNREADABLE as fault:
        raise DataError("file_broken", f"{path} cannot be read: {fault}.", "Mend the file.") from fault


def read_item_ids(path: str | Path, column: str | None = None) -> list[str]:
    """Item ids of a list file: plain text with an id a line (.txt), or a table with an item column."""
    from ..data.columns import ITEM
    from ..data.dataset import as_ids

    path = Path(path)
    if path.suffix.lower() == ".txt":
        detect_format(path)
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as fault:
            raise DataError("not_utf8", f"{path} is not UTF-8: {fault.reason}.", "Convert the file.") from fault
        ids = [line.strip() for line in lines if line.strip()]
    else:
        table = read_table(path)
        present = columns_of(table, path)
        found = need_column(column if column in present else None, present, "item", "--item-column", ITEM, path.name)
        ids = as_ids(collect(table.select(found), path)[found], path, found).drop_nulls().to_list()
    if not ids:
        raise DataError("file_empty", f"{path} holds no item id.", "Give one id a line.")
    return list(dict.fromkeys(ids))
