"""Ops of the search inside a catalog's trie, and their meaning.

Only children that exist (and that the request allows) are ever scored, so no legal item is cut by an illegal one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .draw import Draw
from .spec import INFER, Case, Lookup, at_least_fp32, op, op_claims, reference_group

DEAD = float("-inf")


@dataclass(frozen=True)
class TrieArrays:
    """A catalog's tree on a device: first_child int64 [inner nodes + 1], code int64 [nodes]; node 0 is the root."""

    first_child: Tensor
    code: Tensor


@dataclass(frozen=True)
class NodeFilter:
    """Which nodes each request of a batch may use.

    nodes: int64 [K], each request's rising, one request's behind another's. ends: int64 [R], rising: where each one's end;
    behind the last is anything. allow: int64 [R]; 1: only listed nodes live (an allow list); 0: listed nodes are dead (an
    exclusion, also of none).
    """

    nodes: Tensor
    ends: Tensor
    allow: Tensor


@dataclass(frozen=True)
class Beams:
    """The living prefixes of a batch, best first. score fp32 [R, W] (−inf: no beam), node int64 [R, W], parent int64 [R, W]:
    the beam of the step before that each one extends."""

    score: Tensor
    node: Tensor
    parent: Tensor


@dataclass(frozen=True)
class PassRows:
    """What one pass over R · W beams runs, a row a beam. token_ids, positions: int64 [R · W], each beam's newest token.
    ancestors: int64 [R · W, t], the rows in which its t earlier tokens were run, oldest first."""

    token_ids: Tensor
    positions: Tensor
    ancestors: Tensor


@op_claims(graph_safe=False)  # how many children there are decides shapes
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
        kept = is_allowed(child, row // old_width, node_filter, len(trie.code))
        row, child = row[kept], child[kept]
    gain = logits.reshape(-1, num_codes)[row, trie.code[child]].float()
    lse = (
        _children_normalizer(gain, row, requests * old_width) if normalizer is None else normalizer.reshape(-1).float()
    )
    score = beams.score.reshape(-1)[row].float() + (gain - lse[row])  # scores are fp32, and so is their order
    return _best(score, row, child, requests, old_width, widths, width)


def is_allowed(child: Tensor, request: Tensor, node_filter: NodeFilter, num_nodes: int) -> Tensor:
    """bool per candidate, by binary search among all requests' nodes; `request` is broadcast to `child`. No shape depends on a
    value."""
    nodes, only = node_filter.nodes, node_filter.allow[request] != 0
    if len(nodes) == 0:
        return (~only).expand(child.shape)
    # What is nobody's counts as the next request's, which nobody asks for: above all keys, in whatever order.
    owner = torch.searchsorted(node_filter.ends, torch.arange(len(nodes), device=nodes.device), right=True)
    keys, key = owner * num_nodes + nodes, request * num_nodes + child
    listed = keys[torch.searchsorted(keys, key).clamp_max(len(keys) - 1)] == key
    return listed == only


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


def next_rows(
    beams: Beams, ancestors: Tensor | None, code: Tensor, prompt_lengths: Tensor, level_start: int
) -> PassRows:
    """What the pass after a step runs. beams: [R, W]; a dead one runs as any other, with some token of its level.

    ancestors: int64 [R · W', t] of the pass before, over the beams that these extend; None: before the first pass. code: the
    trie's. prompt_lengths: int64 [R]. level_start: the token of the level's code 0.
    """
    requests, width = beams.node.shape
    token_ids = level_start + code[beams.node].clamp_min(0)
    if ancestors is None:
        ancestors = torch.zeros((requests * width, 0), dtype=torch.int64, device=code.device)
    else:
        offset = torch.arange(requests, device=code.device)[:, None] * (len(ancestors) // requests)
        row = (beams.parent + offset).reshape(-1)
        ancestors = torch.cat((ancestors[row], row[:, None]), 1)
    positions = (prompt_lengths + ancestors.shape[1])[:, None].expand_as(token_ids)
    return PassRows(token_ids.reshape(-1), positions.reshape(-1), ancestors)


def constrained_topk(logits: Tensor, allowed: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest allowed logits of each row, best first; equal ones by lower index.

    logits fp32 [B, C], allowed bool [B, C] -> (values fp32 [B, k], indices int64 [B, k]). Where fewer than k are allowed (an
    allowed −inf counts as not), the rest is −inf at index 0. k may exceed C.
    """
    values, indices = torch.where(allowed, logits, DEAD).sort(dim=-1, descending=True, stable=True)
    short = max(k - logits.shape[-1], 0)
    values = torch.nn.functional.pad(values[:, :k], (0, short), value=DEAD)
    indices = torch.nn.functional.pad(indices[:, :k], (0, short))
    return values, torch.where(values == DEAD, 0, indices)


def restricted_log_softmax(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [..., D], weight [C, D], a level's rows of the head -> (logits fp32 [..., C], log-sum-exp fp32 [...]).

    log p = logits − log-sum-exp; the two stay apart because the search subtracts for the chosen codes only.
    """
    logits = at_least_fp32(torch.nn.functional.linear(hidden, weight))
    return logits, logits.logsumexp(-1)


def _beam_step_cases(draw: Draw) -> Iterator[Case]:
    """A tree with `fanout` children below each of the root's `nodes`; all codes exist somewhere, and not everywhere."""
    for nodes, fanout, requests, width, codes in ((4, 3, 2, 3, 6), (20, 5, 3, 8, 32))[: 2 if draw.full else 1]:
        first = torch.cat((torch.tensor([1]), 1 + nodes + fanout * torch.arange(nodes + 1)))
        code = torch.cat([draw.distinct_floats(codes).argsort()[:fanout].sort().values for _ in range(nodes)])
        score = draw.distinct_floats(requests, width).sort(-1, descending=True).values
        score[-1, -1] = DEAD
        node = 1 + torch.stack([draw.distinct(nodes, width) for _ in range(requests)])
        case = {
            "logits": draw.distinct_floats(requests, width * codes).unflatten(-1, (width, codes)),
            "normalizer": draw.uniform(requests, width, low=4.0, high=5.0),
            "beams": Beams(score, node, torch.zeros_like(node)),
            "trie": TrieArrays(first, torch.cat((torch.tensor([-1]), torch.arange(nodes), code))),
        }
        rest = {"widths": draw.integers(1, 2 * width + 1, requests), "width": 2 * width}
        yield {**case, "node_filter": None, **rest}
        if draw.full:
            counts = [0, len(code) // 2, len(code) // 3][:requests]
            listed = [draw.distinct(len(code), count).sort().values for count in counts]
            stale = draw.integers(0, len(code), 5)
            node_filter = NodeFilter(
                torch.cat((*listed, stale)), torch.tensor(counts).cumsum(0), torch.arange(requests) % 2
            )
            yield {**case, "node_filter": node_filter, **rest}
            yield {**case, "normalizer": None, "node_filter": None, **rest}


def _next_rows_cases(draw: Draw) -> Iterator[Case]:
    for requests, width, old_width, columns in ((2, 5, 3, 1), (3, 4, 1, 0), (1, 1, 7, 3), (17, 9, 9, 2)):
        score = draw.uniform(requests, width)
        score[0, width // 2 :] = DEAD
        node, parent = draw.integers(1, 20, requests, width), draw.integers(0, old_width, requests, width)
        case = {
            "beams": Beams(score, node.where(score != DEAD, 0), parent.where(score != DEAD, 0)),
            "ancestors": draw.integers(0, requests * old_width, requests * old_width, columns),
            "code": torch.cat((torch.tensor([-1]), draw.integers(0, 8, 19))),
            "prompt_lengths": draw.integers(1, 4096, requests),
            "level_start": 8 * columns + 3,
        }
        yield case
        if not draw.full:
            return
        yield {**case, "ancestors": None}


def _constrained_topk_cases(draw: Draw) -> Iterator[Case]:
    for rows, codes, k in ((3, 24, 4), (17, 256, 50), (5, 8, 12))[: 3 if draw.full else 1]:
        logits, allowed = draw.distinct_floats(rows, codes), draw.integers(0, 2, rows, codes).bool()
        logits[:, 1::2] = logits[:, ::2]  # ties
        allowed[-1, k // 2 :] = False  # fewer than k
        yield {"logits": logits, "allowed": allowed, "k": k}


def _restricted_log_softmax_cases(draw: Draw) -> Iterator[Case]:
    for rows, dim, codes in ((3, 64, 24), (17, 128, 256))[: 2 if draw.full else 1]:
        yield {"hidden": draw.normal(rows, dim), "weight": draw.normal(codes, dim, scale=dim**-0.5)}


def _decompose_restricted_log_softmax(op: Lookup) -> Callable[..., tuple[Tensor, Tensor]]:
    mm = op("linear.mm")

    def multiply_then_reduce(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = at_least_fp32(mm(hidden, weight, None))
        return logits, logits.logsumexp(-1)

    return multiply_then_reduce


@dataclass(frozen=True)
class SearchOps:
    """A level of the search: its logits, its choice among codes, its step over the beams, and what these run next."""

    beam_step: Callable[[Tensor, Tensor | None, Beams, TrieArrays, NodeFilter | None, Tensor, int], Beams] = field(
        metadata=op(
            beam_step,
            "logits fp32 [R, W, C], normalizer fp32 [R, W] or None, beams [R, W], trie, node_filter or None, widths int64 [R] "
            "-> Beams [R, width]",
            _beam_step_cases,
            tier="R",
            dtypes=(torch.float32,),
            modes=INFER,
        )
    )
    next_rows: Callable[[Beams, Tensor | None, Tensor, Tensor, int], PassRows] = field(
        metadata=op(
            next_rows,
            "beams [R, W], ancestors int64 [R · W', t] or None, code int64 [nodes], prompt_lengths int64 [R] "
            "-> token_ids, positions int64 [R · W], ancestors int64 [R · W, t + 1]",
            _next_rows_cases,
            tier="D",
            dtypes=(torch.float32,),
            modes=INFER,
        )
    )
    constrained_topk: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = field(
        metadata=op(
            constrained_topk,
            "logits fp32 [B, C], allowed bool [B, C] -> fp32 [B, k], int64 [B, k]",
            _constrained_topk_cases,
            tier="X",
            dtypes=(torch.float32,),
            modes=INFER,
            strided=("logits",),
        )
    )
    restricted_log_softmax: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = field(
        metadata=op(
            restricted_log_softmax,
            "hidden [..., D], weight [C, D] -> fp32 [..., C], fp32 [...]",
            _restricted_log_softmax_cases,
            tier="D",
            modes=INFER,
            needs=("linear.mm",),
            decompose=_decompose_restricted_log_softmax,
            rounds_inside=True,
        )
    )


REFERENCE_SEARCH_OPS = reference_group(SearchOps)
