"""The catalog: which items there are, the SID of each, their names and how often they were bought. Imports no torch.

An item's row is its number everywhere inside Polyrec: in histories, tries and rankings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import CatalogError
from ..core.files import atomic_path, value_digest


@dataclass(frozen=True, eq=False)
class Catalog:
    """item_ids: [I], all different. codes: int32 [I, S], all rows different. names: [I], None where unknown.

    counts: int64 [I], events of the item in what training saw: its popularity. A breach is a CatalogError.
    """

    item_ids: Sequence[str]
    codes: np.ndarray
    names: Sequence[str | None]
    counts: np.ndarray
    _rows: dict[str, int] = field(init=False, repr=False)
    _by_codes: dict[bytes, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        codes = np.ascontiguousarray(self.codes, np.int32)
        num = len(self.item_ids)
        if codes.ndim != 2 or codes.shape[1] == 0 or not num == len(codes) == len(self.names) == len(self.counts):
            raise CatalogError(
                "catalog_shape",
                f"{num} item ids, codes of shape {codes.shape}, {len(self.names)} names and {len(self.counts)} counts "
                "do not make a catalog.",
                "Give each item one row in all four.",
            )
        rows = {item: row for row, item in enumerate(self.item_ids)}
        by_codes = {sid.tobytes(): row for row, sid in enumerate(codes)}
        if len(rows) != num:
            raise CatalogError("item_repeated", f"{num - len(rows)} item ids are repeated.", "Keep each item once.")
        if len(by_codes) != num:
            raise CatalogError(
                "sid_repeated",
                f"{num - len(by_codes)} items repeat another item's SID.",
                "Give each item its own SID (`polyrec prepare` does).",
            )
        for name, value in {
            "codes": codes,
            "counts": np.asarray(self.counts, np.int64),
            "_rows": rows,
            "_by_codes": by_codes,
        }.items():
            object.__setattr__(self, name, value)  # the one place where a frozen dataclass may still be completed

    def __len__(self) -> int:
        return len(self.item_ids)

    @property
    def depth(self) -> int:
        """S, codes per SID."""
        return self.codes.shape[1]

    def row(self, item_id: str) -> int | None:
        """The item's row, or None when the catalog does not know it."""
        return self._rows.get(item_id)

    def rows(self, item_ids: Iterable[str]) -> list[int | None]:
        """`row` of each."""
        return [self._rows.get(item) for item in item_ids]

    def row_of_codes(self, codes: Sequence[int] | np.ndarray) -> int | None:
        """The row of a SID, codes [S], or None when no item has it."""
        return self._by_codes.get(np.asarray(codes, np.int32).tobytes())

    def popular(self, n: int) -> np.ndarray:
        """Rows of the n items with the highest counts, best first, the lower row in a tie: int64 [min(n, I)]."""
        return np.argsort(-self.counts, kind="stable")[:n]

    def save(self, path: str | Path) -> None:
        """Parquet: item_id, name, count, sid (list of int32), in row order."""
        import polars as pl

        table = pl.DataFrame(
            {
                "item_id": pl.Series(list(self.item_ids), dtype=pl.String),
                "name": pl.Series(list(self.names), dtype=pl.String),
                "count": pl.Series(self.counts, dtype=pl.Int64),
                "sid": pl.Series(self.codes.tolist(), dtype=pl.List(pl.Int32)),
            }
        )
        with atomic_path(path) as temporary:
            table.write_parquet(temporary)

    @classmethod
    def load(cls, path: str | Path) -> Catalog:
        """Reads what `save` wrote; other files are a CatalogError."""
        import polars as pl

        remedy = "Name a folder made by `polyrec prepare` or `polyrec train`."
        if not Path(path).is_file():
            raise CatalogError("catalog_missing", f"No catalog at {path}.", remedy)
        try:
            table = pl.read_parquet(path)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise CatalogError("catalog_unreadable", f"{path} is not a Parquet file: {error}.", remedy) from error
        kinds: dict[str, Any] = {"item_id": pl.String, "name": pl.String, "count": pl.Int64, "sid": pl.List(pl.Int32)}
        if missing := kinds.keys() - set(table.columns):
            raise CatalogError("catalog_unreadable", f"{path} lacks the columns {', '.join(sorted(missing))}.", remedy)
        try:
            table = table.select(pl.col(name).cast(kind) for name, kind in kinds.items())
        except pl.exceptions.PolarsError as error:
            raise CatalogError("catalog_unreadable", f"{path} has columns of other kinds: {error}.", remedy) from error
        lengths = table["sid"].list.len().unique().to_list()
        holes = table["item_id"].null_count() + table["count"].null_count() + table["sid"].explode().null_count()
        if len(lengths) != 1 or not lengths[0] or holes:
            raise CatalogError(
                "catalog_unreadable",
                f"{path} has {len(table)} items with SIDs of lengths {lengths} and {holes} empty fields; each item needs "
                "an id, a count and a SID of one length.",
                remedy,
            )
        codes = table["sid"].explode().to_numpy().reshape(len(table), lengths[0])
        return cls(table["item_id"].to_list(), codes, table["name"].to_list(), table["count"].to_numpy())

    @staticmethod
    def fingerprint(codebook_sizes: Sequence[int], codebooks_digest: str) -> str:
        """What a model is tied to: SID layout and codebooks, not the list of items, which changes all the time."""
        return value_digest({"codebook_sizes": [int(size) for size in codebook_sizes], "codebooks": codebooks_digest})
