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
_WIDEST = 256  # bytes of a text that is found together with others
_NARROW = 32  # bytes up to which the longest text says how wide all are
_AT_ONCE = 4096  # texts looked up together
_BUILT_AT_ONCE = 1 << 14
_BUCKET = 8  # cells
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)
_EMPTY = int(EMPTY)
_ROW_BITS, _ROW = np.uint64(32), np.uint64(0xFFFFFFFF)
_WORD = np.dtype("<u8")


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

    def bytes_at(self, row: int) -> bytes:
        """Text `row` in UTF-8; empty where there is none."""
        return self._data[self._offsets[row] : self._offsets[row + 1]].tobytes()


class StringIndex:
    """Which row a text has: a table of cells in buckets of 8, one cache line each.

    A text's number: its UTF-8 in words of 8 bytes, little-endian, zeros after the last; their sum, the first times the
    multiplier, the second times its square and so on, modulo 2^64. Its number modulo a prime is its bucket.

    cells: uint64 [buckets + some, 8]; a cell is a text's number XOR its row, or EMPTY. Who asks for that text so gets the row,
    and of nearly all others something that is none. A text's cell is the first of its bucket or one of those after it, with no
    empty one between. keys: uint64 [N, words], each text once more, so that one read compares it; all ones where it is longer.
    No words where some text has a zero byte, and where there is no text. facts: uint64 [3], the prime, the multiplier, and the
    bytes of the longest text.
    """

    def __init__(self, texts: Strings, cells: np.ndarray, keys: np.ndarray, facts: np.ndarray) -> None:
        self.cells, self.keys, self.facts = cells, keys, facts
        self._texts = texts
        self._cells = cells.reshape(-1).data
        self._prime, self._num = facts[:1], np.array([len(texts)], np.uint64)
        self._num_buckets, self._multiplier, self._longest = facts.tolist()
        self._powers = _powers(self._multiplier, keys.shape[1])
        self._width = keys.shape[1] * _WORD.itemsize

    @classmethod
    def of(cls, texts: Strings, num_buckets: int | None = None, multiplier: int = _MULTIPLIER) -> StringIndex:
        """Two buckets for five texts, or so many: for one text in a thousand there is no cell left in it then."""
        assert len(texts) < 1 << 32, "a row has 32 bits"
        keys, numbers, longest = _keys_and_numbers(texts, multiplier)
        full = numbers ^ np.arange(len(texts), dtype=np.uint64)
        if (full == EMPTY).any():  # one catalog in 10^12
            return cls.of(texts, num_buckets, multiplier + 2)
        facts = np.array([num_buckets or _next_prime(max(len(texts) * 2 // 5, 2)), multiplier, longest], np.uint64)
        order = numbers % facts[:1] << _ROW_BITS
        order |= np.arange(len(texts), dtype=np.uint64)
        order.sort()
        rows, buckets = order & _ROW, order >> _ROW_BITS
        # Each text takes the first cell of its bucket or after it that those before it left.
        number = np.arange(len(texts))
        places = np.maximum.accumulate(buckets.view(np.int64) * _BUCKET - number) + number
        last = int(places[-1]) // _BUCKET if len(places) else 0
        cells = np.full((max(int(facts[0]), last + 1) + 1, _BUCKET), EMPTY)  # one more, so that each chain ends
        cells.reshape(-1)[places] = full[rows.view(np.int64)]
        return cls(texts, cells, keys, facts)

    def find(self, text: str) -> int | None:
        """The row of `text`, None when there is none."""
        key = text.encode("utf-8", "surrogatepass")  # a lone surrogate, which JSON can carry, is in no catalog
        if len(key) > self._longest:
            return None
        number = _number(key, self._multiplier)
        place, num = number % self._num_buckets * _BUCKET, len(self._texts)
        while (cell := self._cells[place]) != _EMPTY:
            if (row := cell ^ number) < num and self._texts.bytes_at(row) == key:
                return row
            place += 1
        return None

    def find_all(self, texts: Sequence[str]) -> np.ndarray:
        """`find` of each text: rows int64 [K], -1 where there is none."""
        if len(texts) > _AT_ONCE:
            parts = [self.find_all(texts[start : start + _AT_ONCE]) for start in range(0, len(texts), _AT_ONCE)]
            return np.concatenate(parts)
        if len(texts) <= _FEW_FOUND or not self._width:
            return self._find_alone(texts)
        if (keys := self._laid_out(texts)) is not None:
            return self._find_together(keys, texts)
        fit = np.array(
            [len(text.encode("utf-8", "surrogatepass")) <= self._width and "\0" not in text for text in texts]
        )
        rows = np.empty(len(texts), np.int64)
        for find, those in ((self.find_all, fit), (self._find_alone, ~fit)):
            rows[those] = find([texts[place] for place in those.nonzero()[0].tolist()])
        return rows

    def _find_alone(self, texts: Sequence[str]) -> np.ndarray:
        found = (self.find(text) for text in texts)
        return np.array([-1 if row is None else row for row in found], np.int64)

    def _laid_out(self, texts: Sequence[str]) -> bytes | None:
        """All texts as `keys` has them, one after another. None where one is too long, or has zeros of its own."""
        joined = "".join(texts)
        if "\0" in joined:
            return None
        if joined.isascii():
            laid = "".join(map(str.ljust, texts, repeat(self._width), repeat("\0"))).encode()
        else:
            laid = b"".join([text.encode("utf-8", "surrogatepass").ljust(self._width, b"\0") for text in texts])
        return laid if len(laid) == self._width * len(texts) else None

    def _find_together(self, laid: bytes, texts: Sequence[str]) -> np.ndarray:
        # Few steps: when nothing is in the caches, each of numpy's functions costs what 100 texts do, see benchmarks/README.md.
        words = np.frombuffer(laid, _WORD).reshape(len(texts), -1)
        numbers = words @ self._powers
        cells = self.cells.take((numbers % self._prime).view(np.int64), axis=0)
        cells ^= numbers[:, None]  # leaves the row where the cell is the text's
        hits = (cells < self._num).reshape(-1).nonzero()[0]
        rows = cells.reshape(-1).take(hits).view(np.int64)
        if len(hits) == len(texts) and self.keys.take(rows, axis=0).tobytes() == laid:
            return rows
        found, rows = rows, np.zeros(len(texts), np.int64)
        rows[hits // _BUCKET] = found
        right = (self.keys.take(rows, axis=0) == words).all(axis=1)
        # A bucket whose last cell is empty has all of its texts.
        unknown = (cells[:, -1] ^ numbers) == EMPTY
        unknown[hits // _BUCKET] = False
        rows[unknown] = -1
        for place in (~right & ~unknown).nonzero()[0].tolist():  # unknown, or not in its bucket
            row = self.find(texts[place])
            rows[place] = -1 if row is None else row
        return rows


def _powers(multiplier: int, num: int) -> np.ndarray:
    """uint64 [num], from the first on."""
    return np.array([pow(multiplier, power, 1 << 64) for power in range(1, num + 1)], np.uint64)


def _number(key: bytes, multiplier: int) -> int:
    """A text's number."""
    number = 0
    for begin in range((len(key) - 1) // 8 * 8, -1, -8):
        number = (number + int.from_bytes(key[begin : begin + 8], "little")) * multiplier & _MASK
    return number


def _keys_and_numbers(texts: Strings, multiplier: int) -> tuple[np.ndarray, np.ndarray, int]:
    """StringIndex's keys, uint64 [N], the texts' numbers, and the bytes of the longest."""
    lengths = np.diff(texts.offsets)
    longest = int(lengths.max()) if len(texts) else 0
    # A few long ones would make all as wide, so they are left to the loop.
    most = longest if longest <= _NARROW else int(np.partition(lengths, len(texts) * 99 // 100)[len(texts) * 99 // 100])
    width = -(-min(max(most, 1), _WIDEST) // 8) * 8
    keys, numbers = np.empty((len(texts), width // 8), np.uint64), np.empty(len(texts), np.uint64)
    powers = _powers(multiplier, width // 8)
    forth = np.arange(width)
    for begin in range(0, len(texts), _BUILT_AT_ONCE):
        part = slice(begin, begin + _BUILT_AT_ONCE)
        places = texts.offsets[:-1][part, None].astype(np.int64) + forth
        bytes_ = texts.read(places) * (forth < lengths[part, None])
        keys[part] = bytes_.view(_WORD)
        numbers[part] = keys[part] @ powers
    for row in (lengths > width).nonzero()[0].tolist():
        keys[row], numbers[row] = EMPTY, _number(texts.bytes_at(row), multiplier)
    return (keys[:, :0] if not len(texts) or (texts.data == 0).any() else keys), numbers, longest


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
