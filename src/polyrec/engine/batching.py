"""From requests to the tensors of one batch, and back from its beams to each request's items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    """One batch, on the host. token_ids: int64 [T], what is not cached of each prompt, packed. lengths: int64 [R], how much
    that is. table: where prompts lie. widths: int64 [R]; width: the largest."""

    token_ids: Tensor
    lengths: Tensor
    table: PageTable
    widths: Tensor
    width: int
    node_filter: NodeFilter | None

    @property
    def prompt_lengths(self) -> Tensor:
        """int64 [R]."""
        cached = self.table.cached
        return self.lengths if cached is None else self.lengths + cached


def make_batch(requests: Sequence[SearchRequest], held: Sequence[Held], page_size: int, trie: Trie) -> Batch:
    """Packs prompts, widths and filters. held: each request's pages, and how much of its prompt they hold already."""
    pairs = list(zip(requests, held, strict=True))
    numbers = np.array(
        [(len(request.prompt) - each.num_cached, each.num_cached, request.beam_width) for request, each in pairs],
        np.int64,
    )
    lengths, cached, widths = np.ascontiguousarray(numbers.T)
    parts = [request.prompt[each.num_cached :] for request, each in pairs]
    return Batch(
        token_ids=torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)),
        lengths=torch.from_numpy(lengths),
        table=make_table(held, cached, int((lengths + cached).max()), page_size),
        widths=torch.from_numpy(widths),
        width=int(widths.max()),
        node_filter=make_filter(requests, trie),
    )


def make_table(held: Sequence[Held], cached: np.ndarray, longest: int, page_size: int) -> PageTable:
    """The host's page table: a row a prompt, page 0 behind its end. cached: int64 [R]."""
    pages = np.zeros((len(held), max(len(each.pages) for each in held)), np.int32)
    for row, each in zip(pages, held, strict=True):
        row[: len(each.pages)] = each.pages
    some = torch.from_numpy(cached) if cached.any() else None
    return PageTable(torch.from_numpy(pages), page_size, longest, some)


def make_filter(requests: Sequence[SearchRequest], trie: Trie) -> NodeFilter | None:
    """Each request's dead or live nodes as sorted keys; None when no request filters anything."""
    keys, allow = [], []
    for index, request in enumerate(requests):
        allowed = request.allowed
        if allowed is not None and request.excluded is not None:
            allowed = np.setdiff1d(allowed, request.excluded)
        allow.append(allowed is not None)
        if allowed is not None:
            levels = live_nodes(trie, allowed)
        elif request.excluded is not None:
            levels = dead_nodes(trie, request.excluded)
        else:
            continue
        keys.append(np.concatenate(levels) + index * trie.num_nodes)
    if not keys:
        return None
    return NodeFilter(keys=torch.from_numpy(np.concatenate(keys)), allow=torch.tensor(allow), stride=trie.num_nodes)


def split_results(requests: Sequence[SearchRequest], scores: Tensor, nodes: Tensor, trie: Trie) -> list[SearchResult]:
    """scores fp32 [R, W] and nodes int64 [R, W] on the host -> each request's own n, without beams that never lived."""
    results = []
    for request, score, node in zip(requests, scores.numpy(), nodes.numpy(), strict=True):
        num = min(request.n, len(score))
        if num and not math.isfinite(score[num - 1]):  # the best come first, so mostly all of them live
            num = min(num, int(np.isfinite(score).sum()))
        results.append(SearchResult(node[:num] - trie.first_leaf, score[:num]))
    return results
