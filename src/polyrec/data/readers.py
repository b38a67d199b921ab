"""Event and item files as lazy tables: Parquet, CSV/TSV, JSONL, RecBole atomic files and `user item item …` lines.

Text formats give text columns, so that ids keep leading zeros and a bad value can be named; `data.dataset` interprets
them. Every fault of a file comes out as a DataError.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Literal, get_args

import polars as pl

from ..core.errors import DataError, closest

Format = Literal["auto", "parquet", "csv", "tsv", "jsonl", "recbole", "sequence"]
SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".inter": "recbole",
    ".item": "recbole",
    ".user": "recbole",
    ".seq": "sequence",
    ".txt": "sequence",
}
RECBOLE_TYPES = ("token", "token_seq", "float", "float_seq")
UNREADABLE = (OSError, EOFError, zlib.error)  # what a file or a gzip stream can raise
# What reading a table can raise; Polars panics on some damaged Parquet pages (decoding asserts sizes).
REFUSALS = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)
UNUSED_BYTE = "\x1f"  # unit separator: a delimiter that no line holds, so a line stays whole


def read_table(path: str | Path, *, format: Format = "auto", encoding: str = "utf-8") -> pl.LazyFrame:
    """The table in `path`, lazily where the format allows (not when compressed or of another encoding than UTF-8).

    Sequence files give the columns user and item, a row per event in the order of the line. Errors: DataError for a
    file that is missing, empty, of no known format, not in `encoding`, or broken.
    """
    path = Path(path)
    kind = detect_format(path, format)
    if kind == "parquet":
        lazy = _parquet(path)
    else:
        source = _text_source(path, encoding)
        if kind == "jsonl":
            lazy = pl.scan_ndjson(source, infer_schema_length=None)
        elif kind == "recbole":
            lazy = _recbole(path, source, encoding)
        elif kind == "sequence":
            lazy = _sequences(source)
        else:
            lazy = _delimited(path, source, encoding, "\t" if kind == "tsv" else None)
    if not columns_of(lazy, path):
        raise DataError("file_empty", f"{path} has no columns.", "Give a file with a header and rows.")
    return lazy


def detect_format(path: Path, format: Format = "auto") -> Format:
    """The format by the file's suffix (below `.gz`), after checking that there is a file with something in it."""
    if format not in get_args(Format):
        raise DataError("format_unknown", f"Unknown format '{format}'. {closest(format, get_args(Format))}", "")
    if path.is_dir():
        raise DataError("file_is_folder", f"{path} is a folder.", "Give one file of it.")
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = closest(path.name, siblings) if siblings else ""
        raise DataError("file_missing", f"No file at {path}.", near if near.startswith("Did") else "Check the path.")
    if not path.is_file():
        raise DataError("file_unreadable", f"{path} is not a regular file.", "Give a file on disk.")
    if path.stat().st_size == 0:
        raise DataError("file_empty", f"{path} is empty.", "Give a file with a header and rows.")
    if format != "auto":
        return format
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() not in SUFFIXES:
        raise DataError(
            "format_unknown",
            f"{path}: no format is known by the suffix '{suffix}' ({', '.join(SUFFIXES)}).",
            "Name it: --format parquet, csv, tsv, jsonl, recbole or sequence.",
        )
    kind = SUFFIXES[suffix.lower()]
    if kind == "sequence" and suffix.lower() == ".txt":  # also the name of many tables
        line = _first_line(path, "utf-8", strict=False)
        return "tsv" if "\t" in line else "csv" if "," in line or ";" in line else "sequence"
    return kind


def columns_of(lazy: pl.LazyFrame, path: str | Path) -> list[str]:
    """Column names of a lazy table, faults as DataError."""
    try:
        return lazy.collect_schema().names()
    except REFUSALS as error:
        raise _broken(Path(path), error) from error


def collect(lazy: pl.LazyFrame, path: str | Path) -> pl.DataFrame:
    """The rows of a lazy table, read in a streaming fashion, faults as DataError."""
    try:
        return lazy.collect(engine="streaming")
    except REFUSALS as error:
        raise _broken(Path(path), error) from error


def _parquet(path: Path) -> pl.LazyFrame:
    try:
        with open(path, "rb") as stream:
            start = stream.read(4)
    except OSError as error:
        raise _broken(path, error) from error
    if start != b"PAR1":
        raise DataError(
            "file_broken", f"{path} is not a Parquet file (it does not start with PAR1).", "Check its format."
        )
    return pl.scan_parquet(path, glob=False)


def _text_source(path: Path, encoding: str) -> Path | io.BytesIO:
    """The path itself when it is plain UTF-8 (checked whole), else its content as UTF-8 in memory."""
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
    except LookupError as error:
        raise DataError(
            "encoding_unknown", f"Unknown encoding '{encoding}'.", "E.g. utf-8, latin-1, utf-16."
        ) from error
    plain = path.suffix != ".gz" and codecs.lookup(encoding).name == "utf-8"
    text = io.StringIO()
    line = 1
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
            while chunk := stream.read(1 << 20):
                decoded = decoder.decode(chunk)
                if not plain:
                    text.write(decoded)
                line += chunk.count(b"\n")
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = line + error.object[: error.start].count(b"\n")
        raise DataError(
            "not_" + codecs.lookup(encoding).name.replace("-", ""),
            f"{path} is not {encoding.upper()}: byte 0x{error.object[error.start]:02x} in line {at}.",
            "Convert the file, or name its encoding: --encoding latin-1 (or utf-16, cp1252, …).",
        ) from error
    except UNREADABLE as error:
        raise _broken(path, error) from error
    return path if plain else io.BytesIO(text.getvalue().removeprefix("\ufeff").encode())


def _first_line(path: Path, encoding: str, *, strict: bool = True) -> str:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding=encoding, errors="strict" if strict else "replace", newline="") as stream:
            for line in stream:
                if line.strip():
                    return line.rstrip("\r\n").removeprefix("\ufeff")
    except UNREADABLE as error:
        raise _broken(path, error) from error
    raise DataError("file_empty", f"{path} holds nothing but blank lines.", "Give a file with a header and rows.")


def _delimited(path: Path, source: Path | io.BytesIO, encoding: str, separator: str | None) -> pl.LazyFrame:
    header = _first_line(path, encoding)
    if separator is None:
        separator = max(",;\t|", key=header.count)
    names = next(csv.reader([header], delimiter=separator))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError("column_twice", f"{path}: column '{twice[0]}' stands twice in the header.", "Rename one.")
    return pl.scan_csv(source, separator=separator, infer_schema=False)


def _recbole(path: Path, source: Path | io.BytesIO, encoding: str) -> pl.LazyFrame:
    header = _first_line(path, encoding).split("\t")
    names = {}
    for field in header:
        name, colon, kind = field.strip().rpartition(":")
        if not colon or kind not in RECBOLE_TYPES:
            raise DataError(
                "recbole_header",
                f"{path}: header field '{field}' has no type such as 'user_id:token'.",
                f"Write name:type with one of {', '.join(RECBOLE_TYPES)}, separated by tabs.",
            )
        names[field] = name
    if len(set(names.values())) < len(header):
        raise DataError("column_twice", f"{path}: a column stands twice in the header.", "Rename one.")
    return pl.scan_csv(source, separator="\t", quote_char=None, infer_schema=False).rename(names)


def _sequences(source: Path | io.BytesIO) -> pl.LazyFrame:
    lines = pl.scan_csv(
        source, has_header=False, separator=UNUSED_BYTE, quote_char=None, schema={"line": pl.String}
    ).select(pl.col("line").str.extract_all(r"\S+").alias("words"))
    lines = lines.filter(pl.col("words").list.len() > 0)
    words = pl.col("words")
    alone = words.list.len() == 1  # a line with a user alone becomes one null item, which cleaning counts
    items = pl.when(alone).then(pl.lit([None], dtype=pl.List(pl.String))).otherwise(words.list.slice(1))
    return lines.select(words.list.first().alias("user"), items.alias("item")).explode("item")


def _broken(path: Path, error: BaseException) -> DataError:
    """A DataError for a file that a parser refused, with the first bad line where plain Python finds it."""
    reason = str(error).strip().split("\n")[0].rstrip(".")
    place = _bad_line(path) if isinstance(error, pl.exceptions.PolarsError) else ""
    return DataError("file_broken", f"{path} cannot be read: {place or reason}.", "Mend the file or name its --format.")


def _bad_line(path: Path) -> str:
    """Where a JSONL or delimited text file goes wrong; empty when that cannot be said."""
    kind = SUFFIXES.get(path.suffix.lower())
    if kind not in ("jsonl", "csv", "tsv", "recbole") or not path.is_file():
        return ""
    with open(path, encoding="utf-8", errors="replace", newline="") as stream:
        if kind == "jsonl":
            for number, line in enumerate(stream, 1):
                try:
                    if line.strip() and not isinstance(json.loads(line), dict):
                        return f"line {number} is not a JSON object"
                except json.JSONDecodeError as fault:
                    return f"line {number} is not valid JSON ({fault.msg} at column {fault.colno})"
            return ""
        header = stream.readline()
        separator = max(",;\t|", key=header.count) if kind == "csv" else "\t"
        stream.seek(0)
        rows = csv.reader(stream, delimiter=separator)
        try:
            width = len(next(rows, []))
            for row in rows:
                if len(row) > width:
                    return f"line {rows.line_num} has {len(row)} fields, the header {width}"
        except csv.Error as fault:
            return f"line {rows.line_num}: {fault}"
    return ""
