"""Millions of texts as two flat arrays, and an index that finds a text's row: both can live in a mapped file. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from .trie import index_dtype

if TYPE_CHECKING:
    import polars as pl

_ROWS_AT_A_TIME = 1 << 20  # joined texts have to stay below polars' 4 GiB a value
# Up to so many texts are looked up one after another. Together is faster from some 40 on when all is in the caches, but after
# a few idle milliseconds nothing is there any more: then numpy's many functions cost 0.2 ms before the first text.
_FEW = 100
_WIDEST = 256  # bytes of a text that is found together with others: all of them are laid out as wide as the longest
_AT_ONCE = 4096  # texts looked up together; each takes the room of the longest of them


class Strings(Sequence["str | None"]):
    """A sequence of texts. data: uint8 [bytes], all texts in UTF-8; offsets: int [N + 1], text i is data[offsets[i]:offsets[i
    + 1]]; missing: bool [N], True where there is no text."""

    def __init__(self, data: np.ndarray, offsets: np.ndarray, missing: np.ndarray) -> None:
        self.data, self.offsets, self.missing = data, offsets, missing
        # Reading one element through a view costs 40 ns, through numpy 150.
        self._data, self._offsets, self._missing = data.data, offsets.data, missing.data

    @classmethod
    def of(cls, texts: Iterable[str | None]) -> Strings:
        """Packs texts, or a polars Series of them."""
        if isinstance(texts, Strings):
            return texts
        series = text_series(texts)
        lengths = series.str.len_bytes().fill_null(0).to_numpy()
        offsets = np.zeros(len(series) + 1, index_dtype(int(lengths.sum())))
        np.cumsum(lengths, out=offsets[1:])
        parts = [_joined(series.slice(row, _ROWS_AT_A_TIME)) for row in range(0, len(series), _ROWS_AT_A_TIME)]
        data = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        return cls(data, offsets, series.is_null().to_numpy())

    def __len__(self) -> int:
        return len(self.missing)

    @overload
    def __getitem__(self, index: int) -> str | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[str | None]: ...

    def __getitem__(self, index: int | slice) -> str | list[str | None] | None:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        return None if self._missing[row] else str(self.bytes_at(row), "utf-8")

    def __iter__(self) -> Iterator[str | None]:
        for begin in range(0, len(self), _ROWS_AT_A_TIME):  # four times faster than one after another
            offsets = self.offsets[begin : begin + _ROWS_AT_A_TIME + 1].tolist()
            missing = self.missing[begin : begin + _ROWS_AT_A_TIME].tolist()
            data = self.data[offsets[0] : offsets[-1]].tobytes()
            for row, gone in enumerate(missing):
                first = offsets[0]
                yield None if gone else str(data[offsets[row] - first : offsets[row + 1] - first], "utf-8")

    def taken(self, rows: np.ndarray) -> list[str | None]:
        """The texts of rows int [K]. 512 of 1.5 million take 0.06 ms, one after another 0.3."""
        if len(rows) <= _FEW:
            return self._taken_one_by_one(rows)
        begins = self.offsets[rows].astype(np.int64)
        lengths = self.offsets[rows + 1] - begins
        # A zero byte is put after each text, so that one split takes them apart again.
        ends = np.cumsum(lengths + 1)
        places = np.repeat(begins - (ends - lengths - 1), lengths + 1)
        places += np.arange(len(places))
        joined = self.read(begins, places)
        joined[ends - 1] = 0
        texts: list[str | None] = str(joined[:-1].data, "utf-8").split("\0")  # type: ignore[assignment]
        if len(texts) != len(rows):  # a text has a zero byte of its own
            return self._taken_one_by_one(rows)
        for place in np.flatnonzero(self.missing[rows]).tolist():
            texts[place] = None
        return texts

    def _taken_one_by_one(self, rows: np.ndarray) -> list[str | None]:
        begins = self.offsets.take(rows)
        if len(self.data):
            self.data.take(begins, mode="clip")  # as `read` does
        places = zip(
            begins.tolist(), self.offsets.take(rows + 1).tolist(), self.missing.take(rows).tolist(), strict=True
        )
        return [None if gone else str(self._data[begin:end], "utf-8") for begin, end, gone in places]

    def read(self, first: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The bytes at `places` (any, where they lie outside). first: one place of each text, read before the others: so the
        processor waits for ten texts at a time, else for one or two, which doubles what 512 texts of 1.5 million take."""
        if not len(self.data):
            return np.zeros(places.shape, np.uint8)
        self.data.take(first, mode="clip")
        return self.data.take(places, mode="clip")

    def bytes_at(self, row: int) -> bytes:
        """Text `row` in UTF-8; empty where there is none."""
        return self._data[self._offsets[row] : self._offsets[row + 1]].tobytes()


class StringIndex:
    """Which row a text has, as chains: starts int [slots + 1]; rows int [N], those of slot k are starts[k] … starts[k + 1] − 1.

    A text's slot is its UTF-8, read as one big-endian number, modulo the slots, which Python computes in 0.1 µs.
    """

    def __init__(self, texts: Strings, starts: np.ndarray, rows: np.ndarray) -> None:
        self.starts, self.rows = starts, rows
        self._texts = texts
        self._starts, self._rows = starts.data, rows.data
        self._num_slots = len(starts) - 1

    @classmethod
    def of(cls, texts: Strings) -> StringIndex:
        """One slot a text, and a prime number of them."""
        num_slots = _next_prime(max(len(texts), 2))
        slots = _slots(texts, num_slots)
        number = index_dtype(num_slots)
        starts = np.zeros(num_slots + 1, number)
        np.cumsum(np.bincount(slots.astype(np.int64), minlength=num_slots), out=starts[1:])
        return cls(texts, starts, np.argsort(slots, kind="stable").astype(number))

    def find(self, text: str) -> int | None:
        """The row of `text`, None when there is none."""
        key = text.encode("utf-8", "surrogatepass")  # a lone surrogate, which JSON can carry, is in no catalog
        slot = int.from_bytes(key, "big") % self._num_slots
        for row in self._rows[self._starts[slot] : self._starts[slot + 1]]:
            if self._texts.bytes_at(row) == key:
                return row
        return None

    def find_all(self, texts: Sequence[str]) -> np.ndarray:
        """`find` of each text: rows int64 [K], -1 where there is none. 490 of 1.5 million take 0.12 ms, one by one 0.6."""
        if len(texts) > _AT_ONCE:
            parts = [self.find_all(texts[start : start + _AT_ONCE]) for start in range(0, len(texts), _AT_ONCE)]
            return np.concatenate(parts)
        if len(texts) > _FEW:
            data = np.frombuffer(f"\0{chr(0).join(texts)}\0".encode("utf-8", "surrogatepass"), np.uint8)
            bounds = np.flatnonzero(data == 0)
            lengths = np.diff(bounds) - 1
            # With a zero byte of its own a text would count as two.
            if len(lengths) == len(texts) and int(lengths.max()) <= _WIDEST:
                return self._find_together(data, bounds[1:], lengths)
        rows = (self.find(text) for text in texts)
        return np.array([-1 if row is None else row for row in rows], np.int64)

    def _find_together(self, data: np.ndarray, ends: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """data: uint8, texts in UTF-8, of which text k has `lengths[k]` bytes and ends before `ends[k]`; rows as `find_all`."""
        # `take` and work in place, since half of what a few hundred texts cost is numpy's own steps.
        width = max(4, -(-int(lengths.max()) // 4) * 4)
        back = np.arange(-width, 0)
        # Zeros before a text change neither the number that it is nor which of two texts of one length it equals.
        inside = np.greater_equal(back, -lengths[:, None]).view(np.uint8)
        keys = (data.take(ends[:, None] + back, mode="clip") * inside).view(np.uint32)  # [K, width / 4]
        words = keys.T if sys.byteorder == "big" else keys.T.byteswap()
        slots, num_slots = np.zeros(len(keys), np.uint64), np.uint64(self._num_slots)
        for word in words:  # below 2^32, as the number of slots is, so that one more word fits
            slots <<= np.uint64(32)
            slots |= word
            slots %= num_slots
        places = slots.view(np.int64)
        first = self.starts.take(places)
        places += 1
        number = self.starts.take(places) - first
        asked = np.arange(len(keys)).repeat(number)
        ends_of_chains = number.cumsum()
        rows = self.rows.take((first - (ends_of_chains - number)).repeat(number) + np.arange(len(asked)))
        text_ends = self._texts.offsets.take(rows + 1)
        alike = (text_ends - self._texts.offsets.take(rows) == lengths.take(asked)).nonzero()[0]
        asked, rows, text_ends = asked.take(alike), rows.take(alike), text_ends.take(alike).astype(np.int64)
        found = np.full(len(keys), -1, np.int64)
        if len(rows):
            texts = self._texts.read(text_ends - 1, text_ends[:, None] + back)
            texts *= inside.take(asked, axis=0)
            equal = np.ones(len(rows), bool)
            for theirs, ours in zip(texts.view(np.uint32).T, keys.take(asked, axis=0).T, strict=True):
                equal &= theirs == ours
            found[asked[equal]] = rows[equal]
        return found


def text_series(texts: Iterable[str | None]) -> pl.Series:
    """The texts as a polars Series."""
    import polars as pl

    return texts if isinstance(texts, pl.Series) else pl.Series(list(texts), dtype=pl.String)


def _joined(part: pl.Series) -> np.ndarray:
    """uint8 [bytes], the texts one after another."""
    return np.frombuffer((part.str.join("").item() or "").encode(), np.uint8)


def _slots(texts: Strings, num_slots: int) -> np.ndarray:
    """uint64 [N]: each text's slot, texts of one length at a time."""
    lengths = np.diff(texts.offsets)
    order = np.argsort(lengths, kind="stable")
    slots = np.zeros(len(texts), np.uint64)
    ends = np.searchsorted(lengths[order], np.unique(lengths), side="right")
    for rows in np.split(order, ends[:-1]):
        if not len(rows):
            continue
        begin = texts.offsets[rows]
        value = np.zeros(len(rows), np.uint64)
        for place in range(int(lengths[rows[0]])):
            value = value << np.uint64(8) | texts.data[begin + place]
            if place % 4 == 3:  # the rest is below 2^32, so four more bytes fit
                value %= np.uint64(num_slots)
        slots[rows] = value % np.uint64(num_slots)
    return slots


def _next_prime(number: int) -> int:
    """The smallest prime that is at least `number`."""
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number
