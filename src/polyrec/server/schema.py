"""What goes over the wire: request bodies (unknown keys refused, types strict), answers, and how a fault is told.

What depends on the server's settings (max_beam_width) is checked in `checked_width`; the rest stands on the fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeGuard, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core.errors import RequestError, closest
from ..core.request import CardAnswer, Recommendation, RecommendRequest, ScoreRule, Source
from ..sid.cards import written_cards

MAX_HISTORY = 10_000  # items, baskets' members counted; the prompt keeps the newest that fit
MAX_ITEM_CHARS = 512
MAX_LISTED = 1_000_000  # exclude and allow; the body limit is met first in practice


def _check_item(value: object, where: str) -> None:
    if not isinstance(value, str):
        raise PydanticCustomError("item_type", "{where} must be a string (an item id or a SID)", {"where": where})
    if not value or len(value) > MAX_ITEM_CHARS:
        limit = {"where": where, "limit": MAX_ITEM_CHARS}
        raise PydanticCustomError("item_length", "{where} must have 1 to {limit} characters", limit)


def _check_history(value: object) -> list[str | list[str]]:
    """The whole check of a history, with own messages: a union's would tell one fault once per alternative."""
    if _is_plain(value):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("history_type", "must be a list of item ids or SIDs, or of lists of them (baskets)")
    if not value or all(entry == [] for entry in value):
        raise PydanticCustomError("history_empty", "holds no item")
    num_items = 0
    for index, entry in enumerate(value):
        members = entry if isinstance(entry, list) else [entry]
        num_items += len(members)
        if num_items > MAX_HISTORY:
            raise PydanticCustomError("history_too_long", "holds more than {limit} items", {"limit": MAX_HISTORY})
        for place, member in enumerate(members):
            _check_item(member, f"history[{index}]" + (f"[{place}]" if isinstance(entry, list) else ""))
    return [entry for entry in value if entry != []]


def _is_plain(value: object) -> TypeGuard[list[str | list[str]]]:
    """Whether it is a right list of items without baskets: told in 0.01 ms for 490, where looking at one after another takes
    0.15, and a union of types 0.06 more."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_HISTORY:
        return False
    try:
        "".join(value)
    except TypeError:
        return False
    lengths = set(map(len, value))
    return 0 not in lengths and max(lengths) <= MAX_ITEM_CHARS


_HISTORY_SCHEMA = {
    "type": "array",
    "items": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
}
History = Annotated[list[str | list[str]], PlainValidator(_check_history), WithJsonSchema(_HISTORY_SCHEMA)]
ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ITEM_CHARS)]
ItemList = Annotated[list[ItemId], Field(max_length=MAX_LISTED)]
Milliseconds = Annotated[int, Field(ge=1)]


class Body(BaseModel):
    """Base of the request bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RecommendBody(Body):
    """POST /v1/recommend; the fields mean what they mean in core.request.RecommendRequest.

    timeout_ms: what the request has instead of the server's timeout, where that is longer.
    """

    history: History
    n: int = 10
    beam_width: int | None = None
    exclude: ItemList = []
    allow: ItemList | None = None
    exclude_seen: bool = False
    unknown: Literal["drop", "error"] = "drop"
    cold: Literal["popular", "error"] = "popular"
    timeout_ms: Milliseconds | None = None

    def to_request(self, max_beam_width: int) -> RecommendRequest:
        """The engine's request, its width checked against the server's limit."""
        checked_width(self.n, self.beam_width, max_beam_width)
        if self.allow is not None and not self.allow:
            raise RequestError("allow_empty", "'allow' is an empty list: no item may be returned.", "Leave it out.")
        return RecommendRequest(
            history=self.history,
            n=self.n,
            beam_width=self.beam_width,
            exclude=self.exclude,
            allow=self.allow,
            exclude_seen=self.exclude_seen,
            unknown=self.unknown,
            cold=self.cold,
        )


class AnswerItem(BaseModel):
    """One recommended item; rank counts from 1."""

    rank: int
    score: float
    item_id: str
    sid: str
    name: str | None


class RecommendAnswer(BaseModel):
    """The answer of /v1/recommend; timing_ms runs from the request's arrival to its answer."""

    request_id: str
    items: list[AnswerItem]
    score_rule: ScoreRule
    source: Source
    unknown_items: list[str]
    timing_ms: float


_NUM_RANKS = 1024  # as many as most servers allow


def encode_answer(answer: Recommendation | CardAnswer, *, request_id: str, timing_ms: float) -> bytes:
    """The engine's answer as a RecommendAnswer in JSON. Of 256 items, which the catalog wrote beforehand, it takes 0.02 ms;
    by way of the models, 0.3."""
    cards = answer if isinstance(answer, CardAnswer) else _in_cards(answer)
    num = len(cards.items)
    assert len(cards.scores) == num, "a score for each item"
    scores = orjson.dumps(cards.scores)
    assert b"n" not in scores, "a score that is no number"  # orjson writes null
    parts = _RANKS[: 3 * num] if num <= _NUM_RANKS else _ranks(num)
    if num:
        parts[1::3] = scores[1:-1].split(b",")
        parts[2::3] = cards.items
        parts[0] = parts[0][1:]  # all items but the first have a comma before them
    head = orjson.dumps({"request_id": request_id})
    tail = orjson.dumps(
        {
            "score_rule": cards.score_rule,
            "source": cards.source,
            "unknown_items": cards.unknown_items,
            "timing_ms": timing_ms,
        }
    )
    return b"".join((head[:-1], b',"items":[', *parts, b"],", tail[1:]))


def _ranks(num: int) -> list[bytes | memoryview]:
    """What stands before the score of each item, and two places behind each: for that and for the item's card."""
    return [part for rank in range(1, num + 1) for part in (b',{"rank":%d,"score":' % rank, b"", b"")]


_RANKS = _ranks(_NUM_RANKS)


def _in_cards(answer: Recommendation) -> CardAnswer:
    item_ids, scores, sids, names = zip(*answer.items, strict=True) if answer.items else ((), (), (), ())
    cards = [*written_cards(item_ids, sids, names)]
    return CardAnswer(cards, [*scores], answer.score_rule, answer.source, answer.unknown_items)


class ErrorDetail(BaseModel):
    """What went wrong, for a machine (code) and for a person."""

    code: str
    message: str
    remedy: str
    request_id: str


class ErrorAnswer(BaseModel):
    """The answer of every refused request."""

    error: ErrorDetail


B = TypeVar("B", bound=Body)


def parse_body(cls: type[B], body: bytes) -> B:
    """Bytes -> a checked body; a fault becomes a RequestError that names the keys at fault."""
    try:
        return cls.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(cls, error) from error


def parse_recommend(body: bytes, max_beam_width: int) -> tuple[RecommendRequest, int | None]:
    """`parse_body` of RecommendBody, its `to_request` and its timeout_ms: what is plain in half the time."""
    if (plain := _plain_request(body)) is None:
        parsed = parse_body(RecommendBody, body)
        return parsed.to_request(max_beam_width), parsed.timeout_ms
    checked_width(plain[0].n, plain[0].beam_width, max_beam_width)
    return plain


_PLAIN_KEYS = frozenset(("history", "n", "beam_width", "exclude_seen", "timeout_ms"))


def _plain_request(body: bytes) -> tuple[RecommendRequest, int | None] | None:
    """What RecommendBody would make of a usual body. None: that is for the model to say, and what is wrong with it."""
    try:
        given = orjson.loads(body)
    except ValueError:
        return None
    if not (
        type(given) is dict
        and given.keys() <= _PLAIN_KEYS
        and _is_plain(given.get("history"))
        and type(given.get("n", 10)) is int
        and type(given.get("beam_width", 10)) is int
        and type(given.get("exclude_seen", False)) is bool
    ):
        return None
    timeout_ms = given.pop("timeout_ms", None)
    if timeout_ms is not None and (type(timeout_ms) is not int or timeout_ms < 1):
        return None
    return RecommendRequest(**given), timeout_ms


def checked_width(n: int, beam_width: int | None, max_beam_width: int) -> None:
    """n within 1…max_beam_width, beam_width within n…max_beam_width."""
    if not 1 <= n <= max_beam_width:
        raise RequestError("n_out_of_range", f"n is {n}; this server allows 1 to {max_beam_width}.", "Correct n.")
    if beam_width is not None and not n <= beam_width <= max_beam_width:
        raise RequestError(
            "beam_width_out_of_range",
            f"beam_width is {beam_width}; it must be at least n = {n} and at most {max_beam_width}.",
            "Correct beam_width, or leave it out.",
        )


_CODES = {
    "json_invalid": ("json_invalid", "Send one JSON object, UTF-8 encoded."),
    "extra_forbidden": ("unknown_key", "Remove or rename the key."),
    "missing": ("missing_key", "Add the key."),
    "history_empty": ("history_empty", "Send at least one item; for a new user, send what they look at now."),
    "history_too_long": ("history_too_long", "Send the newest part; the model reads only what fits its prompt."),
    "item_type": ("value_invalid", 'Write item ids and SIDs as JSON strings, numbers too: "42".'),
}


def _refusal(cls: type[Body], error: ValidationError) -> RequestError:
    """The first fault gives the code; up to three are told."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    code, remedy = _CODES.get(faults[0]["type"], ("value_invalid", "Correct the value; docs/server.md lists the keys."))
    told = [_tell(cls, fault) for fault in faults[:3]]
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return RequestError(code, "; ".join(told) + more + ".", remedy)


def _tell(cls: type[Body], fault: Any) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
    if fault["type"] == "extra_forbidden":
        known = f" ({closest(path, cls.model_fields)})" if len(fault["loc"]) == 1 else ""
        return f"Unknown key '{path[:80]}'{known}"
    if fault["type"] in ("item_type", "item_length"):
        return str(fault["msg"])
    return f"'{path[:80]}': {fault['msg']}" if path else str(fault["msg"])
