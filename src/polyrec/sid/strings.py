"""Millions of texts as two flat arrays, and an index that finds a text's row: both can live in a mapped file. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, overload

import numpy as np

from .trie import index_dtype

if TYPE_CHECKING:
    import polars as pl

_ROWS_AT_A_TIME = 1 << 20  # joined texts have to stay below polars' 4 GiB a value
# Up to so many texts are looked up, or fetched, one after another. Together is faster from fewer on when all is in the caches,
# but after a few idle milliseconds nothing is there any more, and numpy's many functions come first. Estimates.
_FEW_FOUND, _FEW_TAKEN = 50, 100
_WIDEST = 256  # bytes of a text that is found together with others: all of them are laid out as wide as the longest
_NARROW = 32  # bytes up to which all are laid out as wide as the longest of the catalog, which asks for no look at each
_BACK = np.arange(-_WIDEST, 0, dtype=np.int16)
_AT_ONCE = 4096  # texts looked up together; each takes the room of the longest of them
_BUILT_AT_ONCE = 1 << 14
_BUCKET = 8  # cells
_NUM_TAGS = (1 << 26) - 5  # a prime
_SCATTER = (
    2_654_435_761  # consecutive numbers would fill buckets side by side, and one that is full needs room in the next
)
EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)
_EMPTY = int(EMPTY)
_ROW_BITS, _ROW = np.uint64(32), np.uint64(0xFFFFFFFF)


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
        if len(rows) <= _FEW_TAKEN:
            return self._taken_one_by_one(rows)
        begins = self.offsets[rows].astype(np.int64)
        lengths = self.offsets[rows + 1] - begins
        # A zero byte is put after each text, so that one split takes them apart again.
        ends = np.cumsum(lengths + 1)
        places = np.repeat(begins - (ends - lengths - 1), lengths + 1)
        places += np.arange(len(places))
        self.read(begins)  # so the processor waits for ten texts at a time, else for one or two
        joined = self.read(places)
        joined[ends - 1] = 0
        texts: list[str | None] = str(joined[:-1].data, "utf-8").split("\0")  # type: ignore[assignment]
        if len(texts) != len(rows):  # a text has a zero byte of its own
            return self._taken_one_by_one(rows)
        for place in np.flatnonzero(self.missing[rows]).tolist():
            texts[place] = None
        return texts

    def _taken_one_by_one(self, rows: np.ndarray) -> list[str | None]:
        begins = self.offsets.take(rows)
        self.read(begins)  # as `taken` does
        places = zip(
            begins.tolist(), self.offsets.take(rows + 1).tolist(), self.missing.take(rows).tolist(), strict=True
        )
        return [None if gone else str(self._data[begin:end], "utf-8") for begin, end, gone in places]

    def read(self, places: np.ndarray) -> np.ndarray:
        """The bytes at `places` (any, where they lie outside)."""
        return self.data.take(places, mode="clip") if len(self.data) else np.zeros(places.shape, np.uint8)

    def read_before(self, ends: np.ndarray, width: int) -> np.ndarray:
        """The `width` bytes before each of `ends` int [K], uint8 [K, width]; others, where there are fewer."""
        views = np.ndarray(len(self.data) - width + 1, np.dtype((np.void, width)), self.data, strides=(1,))
        return views[np.maximum(ends - width, 0)].view(np.uint8).reshape(len(ends), width)

    def bytes_at(self, row: int) -> bytes:
        """Text `row` in UTF-8; empty where there is none."""
        return self._data[self._offsets[row] : self._offsets[row + 1]].tobytes()


class StringIndex:
    """Which row a text has: a table of cells in buckets of 8, one cache line each.

    cells: uint64 [buckets + some, 8]; a cell holds a text's tag in its upper 32 bits and its row in the lower, or is EMPTY.
    facts: uint64 [3], two primes, and the bytes of the longest text (0 where a text has a zero byte). A text's UTF-8, read as
    one big-endian number, times _SCATTER, modulo the first prime is its bucket and modulo the second its tag. Its cell is the
    first of its bucket or one of those after it, with no empty one between.
    """

    def __init__(self, texts: Strings, cells: np.ndarray, facts: np.ndarray) -> None:
        self.cells, self.facts = cells, facts
        self._texts = texts
        self._cells = cells.reshape(-1).data
        self._divisors = facts[:2]
        self._num_buckets, self._num_tags, self._longest = facts.tolist()
        self._powers = _powers(self._divisors)

    @classmethod
    def of(cls, texts: Strings, num_buckets: int | None = None) -> StringIndex:
        """A bucket for three texts, or so many: for a few texts in a thousand there is no cell left in it then."""
        assert len(texts) < 1 << 32, "a row has 32 bits"
        longest = 0 if not len(texts) or (texts.data == 0).any() else int(np.diff(texts.offsets).max())
        facts = np.array([num_buckets or _next_prime(max(len(texts) // 3, 2)), _NUM_TAGS, longest], np.uint64)
        buckets, tags = _remainders_of_all(texts, facts[:2])
        order = buckets << _ROW_BITS
        order |= np.arange(len(texts), dtype=np.uint64)
        order.sort()
        rows, buckets = order & _ROW, order >> _ROW_BITS
        # Each text takes the first cell of its bucket or after it that those before it left.
        number = np.arange(len(texts))
        places = np.maximum.accumulate(buckets.view(np.int64) * _BUCKET - number) + number
        last = int(places[-1]) // _BUCKET if len(places) else 0
        cells = np.full((max(int(facts[0]), last + 1) + 1, _BUCKET), EMPTY)  # one more, so that each chain ends
        cells.reshape(-1)[places] = tags[rows.view(np.int64)] << _ROW_BITS | rows
        return cls(texts, cells, facts)

    def find(self, text: str) -> int | None:
        """The row of `text`, None when there is none."""
        key = text.encode("utf-8", "surrogatepass")  # a lone surrogate, which JSON can carry, is in no catalog
        number = int.from_bytes(key, "big") * _SCATTER
        place, tag = number % self._num_buckets * _BUCKET, number % self._num_tags
        while (cell := self._cells[place]) != _EMPTY:
            if cell >> 32 == tag and self._texts.bytes_at(row := cell & 0xFFFFFFFF) == key:
                return row
            place += 1
        return None

    def find_all(self, texts: Sequence[str]) -> np.ndarray:
        """`find` of each text: rows int64 [K], -1 where there is none."""
        if len(texts) > _AT_ONCE:
            parts = [self.find_all(texts[start : start + _AT_ONCE]) for start in range(0, len(texts), _AT_ONCE)]
            return np.concatenate(parts)
        if len(texts) > _FEW_FOUND and (keys := self._keys(texts)) is not None:
            rows, certain = self._find_together(keys, len(texts))
            if certain is not None:
                for place in (~certain).nonzero()[0].tolist():  # unknown, or not in its bucket
                    row = self.find(texts[place])
                    rows[place] = -1 if row is None else row
            return rows
        if len(texts) > _FEW_FOUND and 0 < len(fit := self._places_of_fitting(texts)) < len(texts):
            rows = np.full(len(texts), -1, np.int64)
            rows[fit] = self.find_all([texts[place] for place in fit])
            return rows
        found = (self.find(text) for text in texts)
        return np.array([-1 if row is None else row for row in found], np.int64)

    def _places_of_fitting(self, texts: Sequence[str]) -> list[int]:
        """Of texts that may be among the known ones, by their length and zeros."""
        if not self._longest:
            return []
        sizes = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
        return [place for place, text in enumerate(texts) if sizes[place] <= self._longest and "\0" not in text]

    def _keys(self, texts: Sequence[str]) -> bytes | None:
        """All texts in UTF-8, with zeros before each of them up to one width, a multiple of 4: that changes neither the number
        that a text is nor which of two texts it equals. None where one is too long, or has zeros of its own."""
        joined = "".join(texts)
        if not self._longest or "\0" in joined:
            return None
        encoded = None if joined.isascii() else [text.encode("utf-8", "surrogatepass") for text in texts]
        width = _words(self._longest if self._longest <= _NARROW else max(map(len, encoded or texts))) * 4
        if width > min(_widest(self._num_buckets), len(self._texts.data)):
            return None
        if encoded is None:
            keys = "".join(map(str.rjust, texts, repeat(width), repeat("\0"))).encode()
        else:
            keys = b"".join([text.rjust(width, b"\0") for text in encoded])
        return keys if len(keys) == width * len(texts) else None

    def _find_together(self, keys: bytes, num: int) -> tuple[np.ndarray, np.ndarray | None]:
        """keys: of `num` texts. Returns int64 [num], rows that may be theirs or -1, and bool [num], whether that is certain;
        None: of all."""
        # Few steps: half of what a few hundred texts cost is numpy's own, and more when nothing is in the caches.
        words = np.frombuffer(keys, ">u4").reshape(num, -1)
        remainders = _remainders(words, self._powers, self._divisors)
        cells = self.cells.take(remainders[:, 0].view(np.int64), axis=0)
        cells ^= remainders[:, 1:] << _ROW_BITS  # leaves the row alone where the tag is the same
        hits = (cells <= _ROW).reshape(-1).nonzero()[0]
        rows = cells.reshape(-1).take(hits).view(np.int64)
        unknown = None
        if len(hits) != num:
            rows, known = np.zeros(num, np.int64), rows
            rows[hits // _BUCKET] = known
            # A bucket whose last cell is empty has all of its texts, and none of those has the tag.
            unknown = (cells[:, -1] & _ROW) == _ROW
            unknown[hits // _BUCKET] = False
        ends = self._texts.offsets.take(rows + 1)
        lengths = ends - self._texts.offsets.take(rows)
        width = words.shape[1] * 4
        theirs = self._texts.read_before(ends, width)
        theirs *= _BACK[-width:] >= -lengths[:, None]
        if theirs.tobytes() == keys and lengths.max() <= width <= ends.min():
            return rows, None
        ours = np.frombuffer(keys, np.uint8).reshape(num, width)
        certain = (theirs == ours).all(axis=1) & (lengths <= width) & (ends >= width)
        if unknown is not None:
            rows[unknown] = -1
            certain |= unknown
        return rows, certain


def _words(length: int) -> int:
    """Of 4 bytes, for so many bytes."""
    return max(1, -(-length // 4))


def _remainders(words: np.ndarray, powers: np.ndarray, divisors: np.ndarray) -> np.ndarray:
    """Texts as numbers, big-endian uint32 [K, words], times _SCATTER, modulo each divisor: uint64 [K, 2]."""
    remainders = words @ powers[-words.shape[1] :]
    remainders %= divisors
    return remainders


def _powers(divisors: np.ndarray) -> np.ndarray:
    """The powers of 2^32 times _SCATTER, modulo each divisor, the highest first: uint64 [words of the widest text, 2]. The sum
    of all words times theirs stays below 2^64, see `_widest`."""
    moduli: list[int] = divisors.tolist()
    numbers = range(_widest(moduli[0]) // 4 - 1, -1, -1)
    return np.array(
        [[_SCATTER * pow(2, 32 * number, modulus) % modulus for modulus in moduli] for number in numbers], np.uint64
    )


def _widest(num_buckets: int) -> int:
    """Bytes of a text that can be found together with others."""
    return min(_WIDEST, (1 << 32) // num_buckets * 4)


def _remainders_of_all(texts: Strings, divisors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`_remainders` of all texts: two uint64 [N]."""
    buckets, tags = np.empty(len(texts), np.uint64), np.empty(len(texts), np.uint64)
    widest, powers = _widest(int(divisors[0])), _powers(divisors)
    for begin in range(0, len(texts), _BUILT_AT_ONCE):
        part = slice(begin, begin + _BUILT_AT_ONCE)
        ends = texts.offsets[1:][part].astype(np.int64)
        lengths = ends - texts.offsets[:-1][part]
        # A few long ones would make all as wide, so they are left to the loop.
        limit = widest if 8 * int((lengths > _NARROW).sum()) > len(lengths) else min(_NARROW, widest)
        back = np.arange(-_words(min(int(lengths.max()), limit)) * 4, 0)
        bytes_ = texts.read(ends[:, None] + back) * (back >= -lengths[:, None])
        remainders = _remainders(bytes_.view(">u4"), powers, divisors)
        for place in (lengths > limit).nonzero()[0].tolist():
            number = int.from_bytes(texts.bytes_at(begin + place), "big") * _SCATTER
            remainders[place] = [number % divisor for divisor in divisors.tolist()]
        buckets[part], tags[part] = remainders.T
    return buckets, tags


def text_series(texts: Iterable[str | None]) -> pl.Series:
    """The texts as a polars Series."""
    import polars as pl

    return texts if isinstance(texts, pl.Series) else pl.Series(list(texts), dtype=pl.String)


def _joined(part: pl.Series) -> np.ndarray:
    """uint8 [bytes], the texts one after another."""
    return np.frombuffer((part.str.join("").item() or "").encode(), np.uint8)


def _next_prime(number: int) -> int:
    """The smallest prime that is at least `number`."""
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number
