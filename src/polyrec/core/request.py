"""The request and the answer of a recommendation, as every entrance (Python, files, HTTP) sees them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

ScoreRule = Literal["level", "sid", "vocab", "children"]
SCORE_RULES: tuple[ScoreRule, ...] = ("level", "sid", "vocab", "children")
SCORE_HELP = "Codes compete within their level, among all SID tokens, in the whole vocab, or with valid children only."


@dataclass(frozen=True, kw_only=True)
class RecommendRequest:
    """What one user asks.

    history: oldest first; an entry is an item id or a SID (`<s_a_1><s_b_2>…`), or a list of them: one basket, unordered.
    n: how many items come back; beam_width: how many prefixes live (default n; at least n).
    exclude: items (ids or SIDs) never returned; allow: only these may be returned; exclude_seen: the history's items are
    not returned.
    unknown: unknown history items are dropped and reported, or an error.
    cold: a history without any known item gets the most popular items, flagged, or an error.
    """

    history: Sequence[str | Sequence[str]]
    n: int = 10
    beam_width: int | None = None
    exclude: Sequence[str] = ()
    allow: Sequence[str] | None = None
    exclude_seen: bool = False
    unknown: Literal["drop", "error"] = "drop"
    cold: Literal["popular", "error"] = "popular"


class RecommendedItem(NamedTuple):
    """One recommended item; score is a log-probability under the answer's rule (or a count, from popularity).

    A tuple, since an answer of 512 items makes 512 of them: a third of what as many frozen dataclasses take.
    """

    item_id: str
    score: float
    sid: str
    name: str | None = None


Source = Literal["model", "popularity"]


@dataclass(frozen=True)
class Recommendation:
    """The answer: items best first; source tells whether the model or, for a cold user, popularity chose them."""

    items: tuple[RecommendedItem, ...]
    score_rule: ScoreRule
    source: Source = "model"
    unknown_items: tuple[str, ...] = ()

    @property
    def item_ids(self) -> list[str]:
        """The item ids alone, best first."""
        return [item.item_id for item in self.items]


@dataclass(frozen=True)
class CardAnswer:
    """A Recommendation for who writes JSON and needs no items one by one.

    items: of each item its card, JSON in UTF-8 of all that is the same in every answer (`sid.cards`). scores: as many.
    """

    items: Sequence[memoryview | bytes]
    scores: list[float]
    score_rule: ScoreRule
    source: Source = "model"
    unknown_items: tuple[str, ...] = ()
