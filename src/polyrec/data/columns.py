"""Which column of a table is the user, the item, the time: named by the user, else recognised by its usual names."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from ..core.config import Settings
from ..core.errors import DataError, closest

NONE = "none"  # as a column name: do without, also if a usual name is there

# Tiers of usual names, letters and digits only: of several columns the earlier tier wins; two of one are ambiguous.
USER = (
    ("user", "userid", "uid"),
    ("customerid", "customer", "memberid", "accountid", "clientid", "reviewerid", "visitorid", "buyerid", "playerid"),
    ("sessionid", "session"),
)
ITEM = (
    ("item", "itemid", "iid"),
    ("productid", "product", "sku", "stockcode", "articleid", "parentasin", "movieid", "trackid", "bookid", "songid"),
    ("asin", "videoid", "newsid", "listingid", "gameid", "businessid"),
    ("id",),
)
TIME = (
    ("timestamp", "eventtimestamp", "timestampms"),
    ("time", "datetime", "eventtime", "ts", "unixreviewtime", "invoicedate", "orderdate", "createdat", "purchasedate"),
    ("date", "tdat", "reviewtime", "day", "eventdate"),
)
BASKET = (
    ("basket", "basketid"),
    ("orderid", "invoiceno", "invoice", "invoiceid", "transactionid", "ordernumber", "cartid", "receiptid"),
)
NAME = (("title",), ("name",), ("itemname", "productname", "producttitle", "itemtitle"), ("description",), ("text",))
TEXT = (
    *("title", "name", "itemname", "productname", "producttitle", "itemtitle", "description", "text", "features"),
    *("category", "categories", "genre", "genres", "tags", "brand", "author", "authors", "manufacturer"),
)


class ColumnMap(Settings):
    """Column names; None recognises a column by its usual names, 'none' does without it (time, basket, name).

    user, item, time, basket: of the events. item_id, name, text: of the items; text columns are joined in this order.
    """

    user: str | None = None
    item: str | None = None
    time: str | None = None
    basket: str | None = None
    item_id: str | None = None
    name: str | None = None
    text: tuple[str, ...] = ()


def find_column(
    chosen: str | None, present: list[str], role: str, flag: str, tiers: tuple[tuple[str, ...], ...], where: str
) -> str | None:
    """The column for `role`, or None when none was named and no usual name is there.

    Errors: DataError for a named column that is absent, or two columns that could equally be meant.
    """
    if chosen is not None:
        if chosen in present:
            return chosen
        if chosen == NONE:
            return None
        raise DataError(
            "column_missing",
            f"{where} has no column '{chosen}' for the {role}. {closest(chosen, present)}",
            f"Name the right column with {flag}.",
        )
    for tier in tiers:
        found = [name for name in present if plain(name) in tier]
        if len(found) > 1:
            raise DataError(
                "column_ambiguous",
                f"{where}: the {role} could be column {' or '.join(map(repr, found))}.",
                f"Name one: {flag} {found[0]}.",
            )
        if found:
            return found[0]
    return None


def need_column(
    chosen: str | None, present: list[str], role: str, flag: str, tiers: tuple[tuple[str, ...], ...], where: str
) -> str:
    """As `find_column`, but none found is a DataError that names the closest column and the flag."""
    column = None if chosen == NONE else find_column(chosen, present, role, flag, tiers, where)
    if column is not None:
        return column
    near = _nearest(present, tiers)
    guess = f"The closest is '{near}'." if near else f"It has: {', '.join(present[:12])}."
    raise DataError(
        "column_missing",
        f"{where} has no column for the {role} (such as '{tiers[0][0]}' or '{tiers[1][0]}'). {guess}",
        f"Name it: {flag} {near or 'COLUMN'}.",
    )


def plain(name: str) -> str:
    """A column name without case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _nearest(present: list[str], tiers: tuple[tuple[str, ...], ...]) -> str | None:
    """The present column most like any usual name of a role."""
    usual = [name for tier in tiers for name in tier]
    scored = [(max(SequenceMatcher(None, plain(name), other).ratio() for other in usual), name) for name in present]
    score, name = max(scored, default=(0.0, ""), key=lambda pair: pair[0])
    return name if score >= 0.5 else None
