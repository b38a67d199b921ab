"""The catalog: which items there are, the SID of each, their names and how often they were bought. Imports no torch.

An item's row is its number everywhere inside Polyrec: in histories, tries and rankings. A large catalog is read once from
Parquet; what was made of it, the trie and the index of ids included, is then kept in a mapped file beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..core.errors import CatalogError
from ..core.files import atomic_path, value_digest
from .cards import Cards
from .mapped import map_arrays, write_arrays
from .strings import StringIndex, Strings, text_series
from .trie import Trie, build_trie

MAPPED_FROM = 100_000  # items; fewer are read from Parquet in 0.1 s

_log = logging.getLogger("polyrec.catalog")


@dataclass(frozen=True, eq=False)
class Catalog:
    """item_ids: [I], all different. codes: int32 [I, S], all rows different. names: [I], None where unknown.

    counts: int64 [I], events of the item in what training saw: its popularity. trie: of the codes. A breach is a CatalogError.
    """

    item_ids: Sequence[str]
    codes: np.ndarray
    names: Sequence[str | None]
    counts: np.ndarray
    trie: Trie = field(init=False, repr=False)
    _index: StringIndex = field(init=False, repr=False)

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
        series = text_series(self.item_ids)
        if repeated := num - series.n_unique():
            raise CatalogError("item_repeated", f"{repeated} item ids are repeated.", "Keep each item once.")
        ids = Strings.of(series)
        index = StringIndex.of(ids)
        self._complete(ids, codes, Strings.of(self.names), np.asarray(self.counts, np.int64), build_trie(codes), index)

    def _complete(
        self, ids: Strings, codes: np.ndarray, names: Strings, counts: np.ndarray, trie: Trie, index: StringIndex
    ) -> None:
        """The one place where a frozen dataclass may still be completed."""
        values = {"item_ids": ids, "codes": codes, "names": names, "counts": counts, "trie": trie, "_index": index}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.item_ids)

    @property
    def depth(self) -> int:
        """S, codes per SID."""
        return self.codes.shape[1]

    def row(self, item_id: str) -> int | None:
        """The item's row, or None when the catalog does not know it."""
        return self._index.find(item_id)

    def rows(self, item_ids: Sequence[str]) -> np.ndarray:
        """The items' rows, int64 [K]; -1 for those that the catalog does not know."""
        return self._index.find_all(item_ids)

    def ids_of(self, rows: np.ndarray) -> list[str]:
        """The ids of rows int [K]."""
        return cast(list[str], cast(Strings, self.item_ids).taken(rows))

    def names_of(self, rows: np.ndarray) -> list[str | None]:
        """The names of rows int [K]."""
        return cast(Strings, self.names).taken(rows)

    @cached_property
    def cards(self) -> Cards:
        """What answers in JSON say of the item of each leaf. Made when first asked for, unless a mapped file has it."""
        return Cards.of(cast(Strings, self.item_ids), self.codes, cast(Strings, self.names), self.trie.rows)

    def row_of_codes(self, codes: Sequence[int] | np.ndarray) -> int | None:
        """The row of a SID, codes [S], or None when no item has it."""
        return self.trie.row_of(codes)

    def popular(self, n: int) -> np.ndarray:
        """Rows of the n items with the highest counts, best first, the lower row in a tie: int64 [min(n, I)]."""
        return np.argsort(-self.counts, kind="stable")[:n]

    def save(self, path: str | Path) -> None:
        """Parquet: item_id, name, count, sid (list of int32), in row order."""
        import polars as pl

        table = pl.DataFrame(
            {
                "item_id": text_series(self.item_ids),
                "name": text_series(self.names),
                "count": pl.Series(self.counts, dtype=pl.Int64),
                "sid": pl.Series(self.codes).cast(pl.List(pl.Int32)),
            }
        )
        with atomic_path(path) as temporary:
            table.write_parquet(temporary)

    @classmethod
    def load(cls, path: str | Path, *, mapped_from: int = MAPPED_FROM) -> Catalog:
        """Reads what `save` wrote; other files are a CatalogError. Of a catalog of `mapped_from` items or more, what was made
        is left in a `.trie` file beside it, which the next call maps (under a millisecond) while the catalog is unchanged.
        """
        path = Path(path)
        if not path.is_file():
            raise CatalogError("catalog_missing", f"No catalog at {path}.", _REMEDY)
        mapped = path.with_suffix(".trie")
        if (arrays := map_arrays(mapped, path)) is not None:
            return cls._of_arrays(arrays)
        catalog = cls(*_read_parquet(path))
        if len(catalog) >= mapped_from:
            try:
                write_arrays(mapped, catalog._arrays(), path)
            except OSError as error:  # a folder that may only be read, or a full disk
                _log.warning(
                    "[catalog_not_mapped] %s cannot be written, so each start reads %s: %s", mapped, path, error
                )
        return catalog

    def _arrays(self) -> dict[str, np.ndarray]:
        """Everything, as `_of_arrays` takes it."""
        ids, names = cast(Strings, self.item_ids), cast(Strings, self.names)
        arrays = {"codes": self.codes, "counts": self.counts}
        arrays |= {name: getattr(self.trie, name) for name in _TRIE}
        arrays |= {f"ids.{name}": getattr(ids, name) for name in _STRINGS}
        arrays |= {f"names.{name}": getattr(names, name) for name in _STRINGS}
        arrays |= {f"cards.{name}": getattr(self.cards, name) for name in _CARDS}
        return arrays | {f"index.{name}": getattr(self._index, name) for name in _INDEX}

    @classmethod
    def _of_arrays(cls, arrays: dict[str, np.ndarray]) -> Catalog:
        """Without the checks, which were made before the arrays were written."""
        catalog = object.__new__(cls)
        ids = Strings(*(arrays[f"ids.{name}"] for name in _STRINGS))
        catalog._complete(
            ids,
            arrays["codes"],
            Strings(*(arrays[f"names.{name}"] for name in _STRINGS)),
            arrays["counts"],
            Trie(**{name: arrays[name] for name in _TRIE}),
            StringIndex(ids, *(arrays[f"index.{name}"] for name in _INDEX)),
        )
        catalog.__dict__["cards"] = Cards(*(arrays[f"cards.{name}"] for name in _CARDS))
        return catalog

    @staticmethod
    def fingerprint(codebook_sizes: Sequence[int], codebooks_digest: str) -> str:
        """What a model is tied to: SID layout and codebooks, not the list of items, which changes all the time."""
        return value_digest({"codebook_sizes": [int(size) for size in codebook_sizes], "codebooks": codebooks_digest})


_REMEDY = "Name a folder made by `polyrec prepare` or `polyrec train`."
_TRIE = ("first_child", "code", "level_starts", "rows")
_STRINGS = ("data", "offsets", "missing")
_CARDS = ("laid", "long", "data", "offsets")
_INDEX = ("cells", "keys", "facts")


def _read_parquet(path: Path) -> tuple[Any, np.ndarray, Any, np.ndarray]:
    """item_ids and names as polars Series, codes int32 [I, S], counts int64 [I]."""
    import polars as pl

    try:
        table = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise CatalogError("catalog_unreadable", f"{path} is not a Parquet file: {error}.", _REMEDY) from error
    kinds: dict[str, Any] = {"item_id": pl.String, "name": pl.String, "count": pl.Int64, "sid": pl.List(pl.Int32)}
    if missing := kinds.keys() - set(table.columns):
        raise CatalogError("catalog_unreadable", f"{path} lacks the columns {', '.join(sorted(missing))}.", _REMEDY)
    try:
        table = table.select(pl.col(name).cast(kind) for name, kind in kinds.items())
    except pl.exceptions.PolarsError as error:
        raise CatalogError("catalog_unreadable", f"{path} has columns of other kinds: {error}.", _REMEDY) from error
    lengths = table["sid"].list.len().unique().to_list()
    holes = table["item_id"].null_count() + table["count"].null_count() + table["sid"].explode().null_count()
    if len(lengths) != 1 or not lengths[0] or holes:
        raise CatalogError(
            "catalog_unreadable",
            f"{path} has {len(table)} items with SIDs of lengths {lengths} and {holes} empty fields; each item needs "
            "an id, a count and a SID of one length.",
            _REMEDY,
        )
    codes = table["sid"].explode().to_numpy().reshape(len(table), lengths[0])
    return table["item_id"], codes, table["name"], table["count"].to_numpy()
