"""What surrounds a search: a request becomes a prompt, found leaves become an answer. It knows the catalog, not the model.

It can stand in another process than the engine, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.errors import RequestError
from ..core.request import CardAnswer, Recommendation, RecommendedItem, RecommendRequest, ScoreRule
from ..data.histories import Kind
from ..data.prompt import PromptBuilder, PromptConfig
from ..sid.cards import sids_of
from ..sid.catalog import Catalog
from ..sid.layout import SidLayout
from ..sid.trie import leaves_of_rows
from .folder import ModelFolder
from .history import ParsedHistory, check_counts, item_list, parse_history, rows_of
from .searches import SearchRequest, SearchResult

_SAMPLE = 128  # items


@dataclass(frozen=True)
class Prepared:
    """A validated request: its search, and the history's entries that were dropped."""

    search: SearchRequest
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class EngineFacts:
    """What only the loaded engine knows. num_leaves: of its trie, which must be the front's. device: its vendor's name."""

    score_rule: ScoreRule
    max_prompt_tokens: int
    vocab_size: int
    num_leaves: int
    device: str


class Front:
    """Prepares requests and finishes answers, for any number of threads."""

    def __init__(
        self, catalog: Catalog, layout: SidLayout, kind: Kind, prompt: PromptConfig, facts: EngineFacts
    ) -> None:
        assert facts.num_leaves == catalog.trie.num_leaves, "the engine searches another catalog"
        self.catalog = catalog
        self.layout = layout
        self.facts = facts
        self._kind = kind
        self.prompts = PromptBuilder(layout, prompt)

    @classmethod
    def of_folder(cls, folder: ModelFolder, facts: EngineFacts) -> Front:
        """The front of a folder read in this process, wherever its engine is."""
        return cls(folder.catalog, folder.layout, folder.kind, folder.prompt, facts)

    def prompt_of(self, rows: np.ndarray, baskets: np.ndarray | None) -> np.ndarray:
        """Token ids int64 [T] of a history: catalog rows int [H] and basket ordinals int [H] (None: each item is one of its
        own). The trainer builds the same."""
        return self.prompts.build(self.catalog.codes.take(rows, axis=0), baskets)

    def beam_width(self, n: int, beam_width: int | None) -> int:
        """More prefixes than items cannot live, and memory is reserved for each."""
        return min(beam_width or n, len(self.catalog))

    def leaves_of(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """The trie's leaves of catalog rows."""
        return self._leaves[rows]

    def prepare(self, request: RecommendRequest) -> Prepared | Recommendation:
        """Validates a request and builds its search; a cold history is answered at once by popularity. Errors: RequestError."""
        check_counts(request.n, request.beam_width)
        parsed = parse_history(request, self.catalog, self.layout)
        excluded = self._known_rows(request.exclude, request, "exclude")
        if request.exclude_seen:
            excluded += parsed.rows.tolist()
        allowed = None if request.allow is None else self._known_rows(request.allow, request, "allow")
        if len(parsed.rows) == 0:
            return self._popular(request, parsed, excluded, allowed)
        # A model of sequences has seen each item as a basket of its own.
        prompt = self.prompt_of(parsed.rows, parsed.baskets if self._kind == "basket" else None)
        self._check_length(prompt)
        search = SearchRequest(
            prompt=prompt,
            n=request.n,
            beam_width=self.beam_width(request.n, request.beam_width),
            excluded=self.leaves_of(excluded) if excluded else None,
            allowed=None if allowed is None else self.leaves_of(allowed),
        )
        return Prepared(search, parsed.unknown)

    def prepare_prompt(self, token_ids: Sequence[int], n: int, beam_width: int | None = None) -> Prepared:
        """A search from a ready prompt, which must end with `<|sid_begin|>`. Errors: RequestError."""
        check_counts(n, beam_width)
        prompt = np.array(token_ids, np.int64)  # a copy: the engine shares its memory with torch, and comes to it later
        if len(prompt) == 0 or prompt[-1] != self.layout.begin:
            raise RequestError(
                "prompt_end", "The prompt does not end with <|sid_begin|>.", "End it with <|sid_begin|>."
            )
        self._check_length(prompt)
        if prompt.min() < 0 or prompt.max() >= self.facts.vocab_size:
            raise RequestError("prompt_token", "The prompt has a token id outside the vocabulary.", "Tokenize it anew.")
        return Prepared(SearchRequest(prompt, n, self.beam_width(n, beam_width)), ())

    def finish(self, prepared: Prepared, found: SearchResult) -> Recommendation:
        """Leaves of the trie -> items with names and scores."""
        items = self._items(self.catalog.trie.rows.take(found.leaves), found.scores)
        return Recommendation(items, self.facts.score_rule, "model", prepared.unknown)

    def finish_as_cards(self, prepared: Prepared, found: SearchResult) -> CardAnswer:
        """`finish` for an answer in JSON: a fourth of its work, and of what it reads from memory."""
        cards = self.catalog.cards.taken(found.leaves)
        return CardAnswer(cards, found.scores.tolist(), self.facts.score_rule, "model", prepared.unknown)

    def make_ready(self) -> None:
        """Makes what the first answers would wait for."""
        self.catalog.cards  # noqa: B018 (a cached property)

    def sample(self) -> tuple[list[str], int, SearchResult]:
        """A history, an n, and what a search could find: items from all over the catalog, as many as a usual request has."""
        places = np.linspace(0, len(self.catalog) - 1, min(_SAMPLE, len(self.catalog))).astype(np.int64)
        fit = max(1, (self.facts.max_prompt_tokens - 1) // (self.layout.depth + 1))
        history = self.catalog.ids_of(places[:fit])
        return history, len(places), SearchResult(places, np.linspace(-1, -20, len(places), dtype=np.float32))

    def _items(self, rows: np.ndarray, scores: np.ndarray) -> tuple[RecommendedItem, ...]:
        """A column at a time: 512 items of 1.5 million take 0.4 ms, one item after another 2."""
        sids = sids_of(self.catalog.codes.take(rows, axis=0))
        ids, names = self.catalog.ids_of(rows), self.catalog.names_of(rows)
        return tuple(map(RecommendedItem._make, zip(ids, scores.tolist(), sids, names, strict=True)))

    def _check_length(self, prompt: np.ndarray) -> None:
        if len(prompt) > self.facts.max_prompt_tokens:
            raise RequestError(
                "prompt_too_long",
                f"The prompt has {len(prompt)} tokens, the model takes {self.facts.max_prompt_tokens}.",
                "Shorten the history.",
            )

    def _known_rows(self, item_ids: Sequence[str], request: RecommendRequest, field: str) -> list[int]:
        items = item_list(item_ids, field)
        if not items:
            return []
        rows, missing = rows_of(items, self.catalog, self.layout)
        if missing and (request.unknown == "error" or (field == "allow" and len(missing) == len(items))):
            raise RequestError(
                "unknown_items",
                f"{len(missing)} of {len(items)} items in '{field}' are not in the catalog, the first is '{missing[0]}'.",
                "Send ids of the catalog.",
            )
        return rows[rows >= 0].tolist()

    @cached_property
    def _leaves(self) -> np.ndarray:
        """Leaf of each row: 4 bytes an item, for who excludes or allows."""
        return leaves_of_rows(self.catalog.trie)

    @cached_property
    def _by_popularity(self) -> np.ndarray:
        """All rows, the most popular first: sorted once, not for every cold history (0.05 s with a million items)."""
        return self.catalog.popular(len(self.catalog))

    def _popular(
        self, request: RecommendRequest, parsed: ParsedHistory, excluded: list[int], allowed: list[int] | None
    ) -> Recommendation:
        if request.cold == "error":
            raise RequestError(
                "cold_history",
                f"None of the {len(parsed.unknown)} items of the history is in the catalog.",
                "Send at least one known item, or let cold be 'popular'.",
            )
        legal = np.ones(len(self.catalog), bool)
        if allowed is not None:
            legal[:] = False
            legal[allowed] = True
        legal[excluded] = False
        rows = self._by_popularity[legal[self._by_popularity]][: request.n]
        items = self._items(rows, self.catalog.counts[rows].astype(float))
        return Recommendation(items, self.facts.score_rule, "popularity", parsed.unknown)
