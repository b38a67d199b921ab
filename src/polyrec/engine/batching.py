"""From requests to the tensors of one batch, and back from its beams to each request's items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..hardware.base.attention import PageTable
from ..hardware.ops.search import NodeFilter
from ..kvcache.prefix import Held
from ..sid.trie import Trie, dead_nodes, live_nodes
from .searches import SearchRequest, SearchResult


@dataclass(frozen=True)
class Batch:
    """One batch, on the host. tokens: int64 [T], what is not cached of each prompt, packed. numbers: int64 [3, R], how much
    that is, what is cached, and beams of each request. pages: int32 [R, columns], where prompts lie, page 0 behind a prompt's
    end. longest: tokens of the longest prompt. width: the most beams of a request.

    All of it is NumPy's, and torch's views are made where they are asked for: a lone request waits for every one of them.
    """

    tokens: np.ndarray
    numbers: np.ndarray
    pages: np.ndarray
    page_size: int
    longest: int
    width: int
    node_filter: NodeFilter | None

    @property
    def num_requests(self) -> int:
        """R."""
        return self.numbers.shape[1]

    @cached_property
    def is_cached(self) -> bool:
        """Whether something of a prompt is."""
        return bool(self.numbers[1].any())

    @property
    def token_ids(self) -> Tensor:
        """`tokens`, for torch; so are the others."""
        return torch.from_numpy(self.tokens)

    @property
    def lengths(self) -> Tensor:
        """int64 [R], of the packed tokens."""
        return torch.from_numpy(self.numbers[0])

    @property
    def widths(self) -> Tensor:
        """int64 [R]."""
        return torch.from_numpy(self.numbers[2])

    @property
    def prompt_lengths(self) -> Tensor:
        """int64 [R], cached tokens among them."""
        return torch.from_numpy(self.numbers[0] + self.numbers[1])

    @property
    def table(self) -> PageTable:
        """The host's page table."""
        cached = torch.from_numpy(self.numbers[1]) if self.is_cached else None
        return PageTable(torch.from_numpy(self.pages), self.page_size, self.longest, cached)


def make_batch(requests: Sequence[SearchRequest], held: Sequence[Held], page_size: int, trie: Trie) -> Batch:
    """Packs prompts, widths and filters. held: each request's pages, and how much of its prompt they hold already."""
    parts = [request.prompt[each.num_cached :] for request, each in zip(requests, held, strict=True)]
    widths = [request.beam_width for request in requests]
    numbers = np.array([[len(part) for part in parts], [each.num_cached for each in held], widths], np.int64)
    return Batch(
        tokens=parts[0] if len(parts) == 1 else np.concatenate(parts),
        numbers=numbers,
        pages=pages_of(held),
        page_size=page_size,
        longest=max(len(request.prompt) for request in requests),
        width=max(widths),
        node_filter=make_filter(requests, trie),
    )


def pages_of(held: Sequence[Held]) -> np.ndarray:
    """int32 [R, most pages of a prompt], zeros behind the others' last."""
    if len(held) == 1:
        return held[0].pages[None]
    pages = np.zeros((len(held), max(len(each.pages) for each in held)), np.int32)
    for row, each in zip(pages, held, strict=True):
        row[: len(each.pages)] = each.pages
    return pages


def make_filter(requests: Sequence[SearchRequest], trie: Trie) -> NodeFilter | None:
    """Each request's dead or live nodes; None when no request filters anything."""
    if all(request.excluded is None and request.allowed is None for request in requests):
        return None
    listed, ends, allow = list[np.ndarray](), list[int](), list[bool]()
    for request in requests:
        allowed = request.allowed
        if allowed is not None and request.excluded is not None:
            allowed = np.setdiff1d(allowed, request.excluded)
        allow.append(allowed is not None)
        if allowed is not None:
            listed += live_nodes(trie, allowed)
        elif request.excluded is not None:
            listed += dead_nodes(trie, request.excluded)
        ends.append(sum(map(len, listed)))
    nodes = torch.from_numpy(np.concatenate(listed).astype(np.int64, copy=False))
    return NodeFilter(nodes, torch.tensor(ends), torch.tensor(allow, dtype=torch.int64))


def split_results(requests: Sequence[SearchRequest], scores: Tensor, nodes: Tensor, trie: Trie) -> list[SearchResult]:
    """scores fp32 [R, W] and nodes int64 [R, W] on the host -> each request's own n, without beams that never lived."""
    results = []
    for request, score, node in zip(requests, scores.numpy(), nodes.numpy(), strict=True):
        num = min(request.n, len(score))
        if num and not math.isfinite(score[num - 1]):  # the best come first, so mostly all of them live
            num = min(num, int(np.isfinite(score).sum()))
        results.append(SearchResult(node[:num] - trie.first_leaf, score[:num]))
    return results
