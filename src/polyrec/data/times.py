"""Times in whatever form a file has them, as µs since 1970 (UTC): numbers of any unit, ISO, usual formats, dates."""

from __future__ import annotations

import polars as pl

from ..core.errors import DataError

ISO = (
    "%Y-%m-%d %H:%M:%S%.f",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%d",
    "%Y/%m/%d %H:%M:%S%.f",
    "%Y/%m/%d %H:%M",
    "%Y/%m/%d",
    "%Y%m%d %H:%M:%S%.f",
)
CLOCKS = (" %H:%M:%S%.f", " %H:%M", " %I:%M:%S %p", " %I:%M %p", "")
DAY_FIRST = tuple(f"{day}{clock}" for day in ("%d/%m/%Y", "%d.%m.%Y", "%d-%m-%Y") for clock in CLOCKS)
MONTH_FIRST = tuple(f"{day}{clock}" for day in ("%m/%d/%Y", "%m.%d.%Y", "%m-%d-%Y") for clock in CLOCKS)
WORDS = ("%d %b %Y %H:%M:%S", "%d %b %Y", "%d %B %Y", "%b %d %Y %H:%M:%S", "%b %d %Y", "%B %d %Y", "%m %d %Y")
# Largest magnitude of each unit: 1e11 s is the year 5138, 1e11 ms is 1973.
UNITS = ((1e11, 1_000_000, 1), (1e14, 1_000, 1), (1e17, 1, 1), (float("inf"), 1, 1_000))


def to_microseconds(values: pl.Series, where: str, time_format: str | None = None) -> pl.Series:
    """int64 µs, null where a value is no time.

    The unit of numbers (s, ms, µs, ns) follows from their median magnitude. Dates such as 3/4/2011 that fit day first
    and month first equally well are a DataError unless `time_format` (strftime) says which.
    """
    kind = values.dtype
    if kind == pl.Date or isinstance(kind, pl.Datetime):
        if isinstance(kind, pl.Datetime) and kind.time_zone is not None:
            values = values.dt.convert_time_zone("UTC")
        return values.cast(pl.Datetime("us")).dt.epoch("us")
    if kind.is_numeric():
        return _from_numbers(values)
    if kind != pl.String and not isinstance(kind, (pl.Categorical, pl.Enum)):
        return _nothing(len(values))  # lists, truth values, clock times: no times
    text = values.cast(pl.String).str.strip_chars()
    if time_format is not None:
        try:
            return _parse(text, time_format)
        except pl.exceptions.PolarsError as error:
            reason = str(error).split("\n")[0]
            raise DataError(
                "time_format", f"The time format '{time_format}' cannot be used: {reason}", "E.g. '%d/%m/%Y %H:%M'."
            ) from error
    numbers = text.cast(pl.Float64, strict=False)
    if numbers.count() and 2 * numbers.count() >= text.count() and not _eight_digits(text):
        whole = text.cast(pl.Int64, strict=False)  # floats round µs and ns counts above 2^53
        return _from_numbers(whole if whole.count() == numbers.count() else numbers)
    return _from_text(text, where)


def _nothing(count: int) -> pl.Series:
    return pl.repeat(None, count, dtype=pl.Int64, eager=True)


def _eight_digits(text: pl.Series) -> bool:
    """Whether all are dates such as 20111209."""
    dates = text.str.contains(r"^(19|20)\d\d(0[1-9]|1[0-2])[0-3]\d$")
    return bool(dates.all())


def _from_numbers(values: pl.Series) -> pl.Series:
    values = values.cast(pl.Float64) if values.dtype.is_decimal() else values
    if values.dtype.is_float():
        values = pl.select(pl.when(values.is_finite()).then(values)).to_series()
    middle = values.abs().cast(pl.Float64).median()
    if middle is None:
        return _nothing(len(values))
    times, parts = next((times, parts) for limit, times, parts in UNITS if float(middle) < limit)
    if values.dtype.is_float():
        return (values * times / parts).round().cast(pl.Int64, strict=False)
    return values.cast(pl.Int64, strict=False) * times // parts


def _from_text(text: pl.Series, where: str) -> pl.Series:
    offset = text.str.extract(r"\d([+-]\d\d:?\d\d)$").str.replace(":", "")
    hours = offset.str.slice(0, 3).cast(pl.Int64) * 3600
    minutes = (offset.str.slice(0, 1) + offset.str.slice(3, 2)).cast(pl.Int64) * 60
    shift = ((hours + minutes) * 1_000_000).fill_null(0)
    bare = (
        text.str.replace(r"^(\d{4}-\d\d-\d\d)[Tt]", "${1} ")
        .str.replace(r"(\d\d:\d\d.*?)\s*(Z|UTC|GMT|[+-]\d\d:?\d\d)$", "${1}")
        .str.replace_all(",", " ")
        .str.replace_all(r"\s+", " ")
    )
    iso = _first_parsed(bare, (*ISO, "%Y%m%d"))
    rest = bare.filter(iso.is_null() & bare.is_not_null())
    if not len(rest):
        return iso - shift
    day, month = _first_parsed(rest, DAY_FIRST), _first_parsed(rest, MONTH_FIRST)
    if day.count() and day.count() == month.count() and not day.equals(month):
        raise DataError(
            "time_ambiguous",
            f"{where}: times such as '{rest[0]}' could be day or month first.",
            "Say which: --time-format '%d/%m/%Y' (or '%m/%d/%Y …', with the clock's part as in the file).",
        )
    formats = (*ISO, "%Y%m%d", *(DAY_FIRST if day.count() >= month.count() else MONTH_FIRST), *WORDS)
    return _first_parsed(bare, formats) - shift


def _first_parsed(text: pl.Series, formats: tuple[str, ...]) -> pl.Series:
    """int64 µs by the first of `formats` that fits each value; a format is tried only on what is still unparsed."""
    out = _parse(text, formats[0])
    for time_format in formats[1:]:
        if out.null_count() == text.null_count():
            break
        out = pl.select(pl.coalesce(out, _parse(text, time_format))).to_series()
    return out


def _parse(text: pl.Series, time_format: str) -> pl.Series:
    if "%z" in time_format:
        return text.str.to_datetime(time_format, time_unit="us", time_zone="UTC", strict=False).dt.epoch("us")
    if not any(part in time_format for part in ("%H", "%I")):
        return text.str.to_date(time_format, strict=False).cast(pl.Datetime("us")).dt.epoch("us")
    return text.str.to_datetime(time_format, time_unit="us", strict=False).dt.epoch("us")
