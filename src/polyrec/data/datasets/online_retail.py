"""UCI Online Retail: the bundled data set and what counts as an event in it.

Licence and attribution: online_retail.LICENSE.txt beside this file.
A UK gift retailer's invoice lines, 2010-12-01 to 2011-12-09. A line is an event when a known customer bought a product:
no cancellation, a price, a stock code that is a product's. An invoice is a basket; its lines have no order.
"""

from __future__ import annotations

from importlib.resources import as_file, files

import polars as pl

from ..dataset import Dataset, assemble
from ..report import ROW, ReportBuilder

NOT_PRODUCTS = ("POST", "M", "C2", "DOT", "PADS", "BANK CHARGES")  # postage, manual entries, carriage, charges


def raw_online_retail() -> pl.DataFrame:
    """The 541,909 invoice lines as published."""
    with as_file(files(__package__) / "online_retail.parquet") as path:
        return pl.read_parquet(path)


def load_online_retail(strict: bool = False) -> Dataset:
    """386,326 events of 4,334 customers and 3,659 items in 18,402 invoices.

    The rules below are the data set's declared cleaning, so `strict` passes.
    """
    report = ReportBuilder("UCI Online Retail")
    lines = raw_online_retail().with_row_index(ROW, offset=1)
    report.rows_read = lines.height
    report.columns = {"user": "CustomerID", "item": "StockCode", "time": "InvoiceDate", "basket": "InvoiceNo"}

    lines = report.clean(lines, pl.col("CustomerID").is_null(), "no_customer", "line without a customer")
    cancelled = pl.col("InvoiceNo").str.starts_with("C")
    lines = report.clean(lines, cancelled, "cancellation", "cancellation", "InvoiceNo")
    lines = report.clean(lines, pl.col("UnitPrice") <= 0, "no_price", "price of zero or less", "UnitPrice")
    no_product = pl.col("StockCode").is_in(NOT_PRODUCTS)
    lines = report.clean(lines, no_product, "no_product", "stock code that is not a product", "StockCode")

    events = lines.select(
        pl.col("CustomerID").cast(pl.Int64).cast(pl.String).alias("user"),
        pl.col("StockCode").alias("item"),
        pl.col("InvoiceDate").dt.epoch("us").alias("time"),
        pl.col("InvoiceNo").alias("basket"),
        ROW,
    )
    again = ~pl.struct("basket", "item").is_first_distinct()
    events = report.clean(events, again, "merged", "further line of an item in one invoice", "item")
    return assemble(events, _items(lines), report, strict=strict)


def _items(lines: pl.DataFrame) -> pl.DataFrame:
    """One row an item; its name is its most frequent description, of equals the first in the alphabet."""
    names = (
        lines.with_columns(pl.col("Description").str.strip_chars().str.replace_all(r"\s+", " "))
        .group_by("StockCode", "Description")
        .len()
        .sort(["StockCode", "len", "Description"], descending=[False, True, False])
        .unique("StockCode", keep="first", maintain_order=True)
    )
    return names.select(
        pl.col("StockCode").alias("item"), pl.col("Description").alias("name"), pl.col("Description").alias("text")
    )
