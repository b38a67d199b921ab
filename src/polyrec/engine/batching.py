"""From requests to the tensors of one batch, and back from its beams to each request's items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..hardware.ops.search import NodeFilter
from ..sid.trie import Trie, dead_nodes, live_nodes


@dataclass(frozen=True)
class SearchRequest:
    """One search. prompt: token ids int64 [T]. n items of `beam_width` prefixes come back. excluded, allowed: leaf numbers of
    the trie that may not, or alone may, be returned."""

    prompt: np.ndarray
    n: int
    beam_width: int
    excluded: np.ndarray | None = None
    allowed: np.ndarray | None = None


@dataclass(frozen=True)
class SearchResult:
    """Best first. leaves: int64 [<= n] leaf numbers of the trie. scores: fp32, log-probabilities under the engine's rule."""

    leaves: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True)
class Batch:
    """One batch, on the host. token_ids, positions: int64 [T] packed prompts. lengths: int64 [R]. last: int64 [R] each prompt's
    last token. widths: int64 [R]; width: the largest."""

    token_ids: Tensor
    positions: Tensor
    lengths: Tensor
    last: Tensor
    widths: Tensor
    width: int
    node_filter: NodeFilter | None


def make_batch(requests: Sequence[SearchRequest], trie: Trie) -> Batch:
    """Packs prompts, widths and filters."""
    lengths = np.array([len(request.prompt) for request in requests])
    ends = np.cumsum(lengths)
    widths = torch.tensor([request.beam_width for request in requests])
    return Batch(
        token_ids=torch.from_numpy(np.concatenate([request.prompt for request in requests])),
        positions=torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)),
        lengths=torch.from_numpy(lengths),
        last=torch.from_numpy(ends - 1),
        widths=widths,
        width=int(widths.max()),
        node_filter=make_filter(requests, trie),
    )


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
        num = min(request.n, int(np.isfinite(score).sum()))
        results.append(SearchResult(node[:num] - trie.first_leaf, score[:num]))
    return results
