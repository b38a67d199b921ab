"""What happened to the rows: drops, cleaning rules and warnings with their counts, for people and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import polars as pl
from rich.table import Table

from ..core.errors import DataError

ROW = "row"  # 1-based position of a data row in its file (a header line is not counted)


@dataclass(frozen=True)
class Drop:
    """Rows that left: `count` of them, and the first one's value and row where that says something."""

    code: str
    count: int
    reason: str
    example: str | None = None
    row: int | None = None

    def __str__(self) -> str:
        first = "" if self.row is None else f" (first: {self.example!r} in row {self.row})"
        return f"{self.count:,} × {self.reason}{first}"


@dataclass(frozen=True)
class Notice:
    """Something to know that changed nothing: `count` cases of it."""

    code: str
    count: int
    message: str


@dataclass(frozen=True)
class DataReport:
    """Counts of a cleaned data set.

    columns: which column served as what. cleaning: rules a bundled data set declares. drops: rows that were faulty.
    """

    source: str
    rows_read: int
    num_events: int
    num_users: int
    num_items: int
    num_baskets: int
    columns: dict[str, str] = field(default_factory=dict)
    cleaning: tuple[Drop, ...] = ()
    drops: tuple[Drop, ...] = ()
    warnings: tuple[Notice, ...] = ()

    @property
    def rows_dropped(self) -> int:
        return sum(drop.count for drop in self.drops)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, stable keys."""
        return asdict(self)

    def render(self) -> Table:
        """A rich table for the terminal."""
        table = Table(title=f"Data: {self.source}", title_justify="left")
        table.add_column("what")
        table.add_column("count", justify="right")
        table.add_column("detail", overflow="fold")
        table.add_row("rows read", f"{self.rows_read:,}", ", ".join(f"{k}={v}" for k, v in self.columns.items()))
        for label, drops in (("cleaned", self.cleaning), ("[yellow]dropped[/]", self.drops)):
            for drop in drops:
                first = "" if drop.row is None else f"; first: {drop.example!r} in row {drop.row}"
                table.add_row(label, f"{drop.count:,}", _plain(drop.reason + first))
        for notice in self.warnings:
            table.add_row("[yellow]warning[/]", f"{notice.count:,}", _plain(notice.message))
        table.add_row("events", f"{self.num_events:,}", f"{self.num_users:,} users, {self.num_items:,} items")
        if self.num_baskets:
            table.add_row("baskets", f"{self.num_baskets:,}", f"{self.num_events / self.num_baskets:.1f} items each")
        return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # values of a user's file are not rich markup


class ReportBuilder:
    """Collects counts while rows are cleaned."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.rows_read = 0
        self.columns: dict[str, str] = {}
        self.cleaning: list[Drop] = []
        self.drops: list[Drop] = []
        self.warnings: list[Notice] = []

    def drop(self, frame: pl.DataFrame, bad: pl.Expr, code: str, reason: str, show: str | None = None) -> pl.DataFrame:
        """`frame` without the rows where `bad` holds (null counts as not bad); they are counted as faulty."""
        return self._remove(self.drops, frame, bad, code, reason, show)

    def clean(self, frame: pl.DataFrame, bad: pl.Expr, code: str, reason: str, show: str | None = None) -> pl.DataFrame:
        """As `drop`, for a rule that the data set declares: no fault, so `strict` does not mind."""
        return self._remove(self.cleaning, frame, bad, code, reason, show)

    def warn(self, code: str, count: int, message: str) -> None:
        """Notes `count` cases; nothing is noted for zero."""
        if count:
            self.warnings.append(Notice(code, count, message))

    def refuse_drops(self) -> None:
        """Under `strict`: one error that lists every drop so far."""
        if self.drops:
            listed = "; ".join(map(str, self.drops))
            raise DataError(
                "strict_data",
                f"{self.source}: rows would be dropped: {listed}.",
                "Mend these rows, or run without --strict-data to drop them.",
            )

    def _remove(
        self, log: list[Drop], frame: pl.DataFrame, bad: pl.Expr, code: str, reason: str, show: str | None
    ) -> pl.DataFrame:
        gone = frame.select(bad.fill_null(False).alias("bad")).to_series()
        count = int(gone.sum())
        if not count:
            return frame
        first = frame.filter(gone).row(0, named=True)
        value = None if show is None or first[show] is None else str(first[show])
        log.append(Drop(code, count, reason, value, first.get(ROW)))
        return frame.filter(~gone)
