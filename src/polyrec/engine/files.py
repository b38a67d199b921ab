"""Recommendations for a whole file of users: read, answered and written a window at a time, so memory stays bounded.

The output is one row per user and rank, in every format: user, rank (from 1), item_id, score, sid, name, source. It is
written beside its place and renamed when whole.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from ..core.errors import DataError, RequestError
from ..core.files import atomic_path
from ..core.request import Recommendation, RecommendRequest
from ..data.readers import SUFFIXES
from .front import Prepared
from .history_files import HistorySource, UserHistory
from .recommender import Recommender

SCHEMA: dict[str, Any] = {
    "user": pl.String,
    "rank": pl.Int32,
    "item_id": pl.String,
    "score": pl.Float32,
    "sid": pl.String,
    "name": pl.String,
    "source": pl.String,
}
FORMATS = ("parquet", "jsonl", "csv", "tsv")
NUM_EXAMPLES = 5

Write = Callable[[pl.DataFrame], None]


@dataclass(frozen=True)
class FileSummary:
    """What became of a file. popularity: users without any known item. empty: users for whom no item was allowed.

    unknown_entries: history entries that the catalog does not know, and were dropped; unknown_items: different ones among
    them; unknown_examples: the most frequent, with their counts.
    """

    users: int
    rows: int
    popularity: int
    empty: int
    history_entries: int
    unknown_entries: int
    unknown_items: int
    unknown_examples: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, stable keys."""
        return asdict(self)


def output_format(path: str | Path) -> str:
    """The format by the suffix. Errors: DataError for a suffix that is not written, or a folder."""
    path = Path(path)
    kind = SUFFIXES.get(path.suffix.lower())
    if kind not in FORMATS:
        raise DataError(
            "format_unknown",
            f"{path}: recommendations cannot be written as '{path.suffix}'.",
            "End the name with .parquet, .jsonl, .csv or .tsv.",
        )
    if path.is_dir():
        raise DataError("file_is_folder", f"{path} is a folder.", "Name a file.")
    return kind


def recommend_file(
    recommender: Recommender,
    source: HistorySource,
    output: str | Path,
    template: RecommendRequest,
    *,
    window: int = 512,
    on_progress: Callable[[int], None] | None = None,
) -> FileSummary:
    """Answers `template`, its history replaced, for each user. window: users held at a time; a window's are batched by
    length. on_progress is called with the number of users just answered. Errors: a RequestError names the user.
    """
    recommender.prepare(replace(template, history=(), cold="popular"))  # faults of the options, before any work
    counts, unknown = Counter[str](), Counter[str]()
    with _writer(Path(output)) as write:
        while users := list(islice(source.users, window)):
            prepared = [_prepare(recommender, user, template) for user in users]
            answers = recommender.answer(prepared)
            write(_table(users, answers))
            for user, answer in zip(users, answers, strict=True):
                unknown.update(answer.unknown_items)
                counts["users"] += 1
                counts["rows"] += len(answer.items)
                counts["popularity"] += answer.source == "popularity"
                counts["empty"] += not answer.items
                counts["entries"] += sum(1 if isinstance(entry, str) else len(entry) for entry in user.history)
            if on_progress:
                on_progress(len(users))
    return FileSummary(
        users=counts["users"],
        rows=counts["rows"],
        popularity=counts["popularity"],
        empty=counts["empty"],
        history_entries=counts["entries"],
        unknown_entries=unknown.total(),
        unknown_items=len(unknown),
        unknown_examples=dict(unknown.most_common(NUM_EXAMPLES)),
    )


def _prepare(recommender: Recommender, user: UserHistory, template: RecommendRequest) -> Prepared | Recommendation:
    try:
        return recommender.prepare(replace(template, history=user.history))
    except RequestError as error:
        raise RequestError(
            error.code, f"User '{user.user}': {error.message}", error.remedy, status=error.status
        ) from error


def _table(users: list[UserHistory], answers: list[Recommendation]) -> pl.DataFrame:
    rows = [
        (user.user, rank, item.item_id, item.score, item.sid, item.name, answer.source)
        for user, answer in zip(users, answers, strict=True)
        for rank, item in enumerate(answer.items, 1)
    ]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


@contextmanager
def _writer(output: Path) -> Iterator[Write]:
    """Takes tables one after another; the file appears when the block ends well."""
    kind = output_format(output)
    with atomic_path(output) as temporary:
        if kind == "parquet":
            with _parquet_parts(temporary) as write:
                yield write
            return
        with open(temporary, "wb") as stream:
            if kind == "jsonl":
                yield lambda table: table.write_ndjson(stream)
            else:
                separator = "\t" if kind == "tsv" else ","
                pl.DataFrame(schema=SCHEMA).write_csv(stream, separator=separator)
                yield lambda table: table.write_csv(stream, include_header=False, separator=separator)


@contextmanager
def _parquet_parts(path: Path) -> Iterator[Write]:
    """A Parquet file cannot grow, so each table becomes a small one, and they are joined in a streaming fashion."""
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.parent) as folder:
        parts = [Path(folder) / "0.parquet"]
        pl.DataFrame(schema=SCHEMA).write_parquet(parts[0])

        def write(table: pl.DataFrame) -> None:
            parts.append(Path(folder) / f"{len(parts)}.parquet")
            table.write_parquet(parts[-1])

        yield write
        pl.scan_parquet(parts, glob=False).sink_parquet(path, maintain_order=True)
