"""One step of beam search inside a catalog's trie, and its meaning.

Only children that exist (and that the request allows) are ever scored, so no legal item is cut by an illegal one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DEAD = float("-inf")


@dataclass(frozen=True)
class TrieArrays:
    """A catalog's tree on a device: first_child int64 [inner nodes + 1], code int64 [nodes]; node 0 is the root."""

    first_child: Tensor
    code: Tensor


@dataclass(frozen=True)
class NodeFilter:
    """Which nodes each request of a batch may use.

    keys: int64 [K] sorted, request · stride + node. allow: bool [R]; True: only listed nodes live (an allow list);
    False: listed nodes are dead (an exclusion). stride: at least the number of nodes.
    """

    keys: Tensor
    allow: Tensor
    stride: int


@dataclass(frozen=True)
class Beams:
    """The living prefixes of a batch, best first. score fp32 [R, W] (−inf: no beam), node int64 [R, W], parent int64 [R, W]:
    the beam of the step before that each one extends."""

    score: Tensor
    node: Tensor
    parent: Tensor


@dataclass(frozen=True)
class SearchOps:
    """beam_step(logits, normalizer, beams, trie, node_filter, widths, width) -> Beams."""

    beam_step: Callable[[Tensor, Tensor | None, Beams, TrieArrays, NodeFilter | None, Tensor, int], Beams]


def beam_step(
    logits: Tensor,
    normalizer: Tensor | None,
    beams: Beams,
    trie: TrieArrays,
    node_filter: NodeFilter | None,
    widths: Tensor,
    width: int,
) -> Beams:
    """Extends every beam by its valid children and keeps each request's best.

    logits: fp32 [R, W, C] of one level's codebook. normalizer: fp32 [R, W] log-sum-exp to subtract; None: over the valid
    children of each beam. widths: int64 [R], how many beams each request keeps; width: columns of the result, the largest.
    Ties go to the lower node, which is the lower SID.
    """
    requests, old_width, num_codes = logits.shape
    device = logits.device
    start = trie.first_child[beams.node]
    count = torch.where(beams.score == DEAD, 0, trie.first_child[beams.node + 1] - start).reshape(-1)
    row = torch.repeat_interleave(torch.arange(requests * old_width, device=device), count)
    before = torch.cumsum(count, 0) - count
    child = start.reshape(-1)[row] + torch.arange(len(row), device=device) - before[row]
    if node_filter is not None:
        kept = _allowed(child, row // old_width, node_filter)
        row, child = row[kept], child[kept]
    gain = logits.reshape(-1, num_codes)[row, trie.code[child]].float()
    lse = _children_normalizer(gain, row, requests * old_width) if normalizer is None else normalizer.reshape(-1)
    score = beams.score.reshape(-1)[row] + (gain - lse[row])
    return _best(score, row, child, requests, old_width, widths, width)


def _allowed(child: Tensor, request: Tensor, node_filter: NodeFilter) -> Tensor:
    """bool per candidate, by binary search in the sorted keys."""
    key = request * node_filter.stride + child
    if len(node_filter.keys) == 0:
        return ~node_filter.allow[request]
    place = torch.searchsorted(node_filter.keys, key).clamp_max(len(node_filter.keys) - 1)
    listed = node_filter.keys[place] == key
    return listed == node_filter.allow[request]


def _children_normalizer(gain: Tensor, row: Tensor, rows: int) -> Tensor:
    """log-sum-exp of the candidates of each row, fp32 [rows]."""
    top = torch.full((rows,), DEAD, device=gain.device).scatter_reduce(0, row, gain, "amax")
    total = torch.zeros(rows, device=gain.device).index_add(0, row, torch.exp(gain - top[row]))
    return top + torch.log(total)


def _best(
    score: Tensor, row: Tensor, child: Tensor, requests: int, old_width: int, widths: Tensor, width: int
) -> Beams:
    """The best candidates of each request, in order; one integer key holds score and node, so ties are exact."""
    device = score.device
    request = row // old_width
    per_request = torch.bincount(request, minlength=requests)
    column = torch.arange(len(row), device=device) - (torch.cumsum(per_request, 0) - per_request)[request]
    columns = max(int(per_request.max()) if len(row) else 0, width)
    key = torch.full((requests, columns), torch.iinfo(torch.int64).min, device=device)
    key[request, column] = (_ordered_bits(score) << 32) | (0xFFFFFFFF - child)
    place = torch.full((requests, columns), -1, dtype=torch.int64, device=device)
    place[request, column] = torch.arange(len(row), device=device)
    best = torch.topk(key, width, dim=1).indices
    chosen = place.gather(1, best)
    live = (chosen >= 0) & (torch.arange(width, device=device) < widths[:, None])
    if len(row) == 0:
        zero = torch.zeros((requests, width), dtype=torch.int64, device=device)
        return Beams(torch.full((requests, width), DEAD, device=device), zero, zero)
    chosen = chosen.clamp_min(0)
    return Beams(
        score=torch.where(live, score[chosen], DEAD),
        node=torch.where(live, child[chosen], 0),
        parent=torch.where(live, row[chosen] % old_width, 0),
    )


def _ordered_bits(score: Tensor) -> Tensor:
    """fp32 -> int64 in the same order (the sign bit flips the magnitude of negatives)."""
    bits = score.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


REFERENCE_SEARCH_OPS = SearchOps(beam_step=beam_step)
