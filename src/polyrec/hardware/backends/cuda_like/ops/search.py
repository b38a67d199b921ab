"""The beam step in a form that can be captured: every shape follows from the arguments' shapes, none from their values.

A beam's children are laid out densely: slot j of C stands for its j-th child, dead where it has fewer. A level's children have
distinct codes, so a beam has at most C. Memory is a few int64 [R, W, C].
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....ops.search import DEAD, REFERENCE_SEARCH_OPS, Beams, NodeFilter, TrieArrays, is_allowed

_NONE = torch.iinfo(torch.int64).min


def beam_step(
    logits: Tensor,
    normalizer: Tensor | None,
    beams: Beams,
    trie: TrieArrays,
    node_filter: NodeFilter | None,
    widths: Tensor,
    width: int,
) -> Beams:
    """`SearchOps.beam_step`, equal to the reference in every bit where normalizer is given (sums differ in order else)."""
    num_codes, device = logits.shape[-1], logits.device
    start = trie.first_child[beams.node]
    count = torch.where(beams.score == DEAD, 0, trie.first_child[beams.node + 1] - start)
    slot = torch.arange(num_codes, device=device)
    live = slot < count[..., None]
    child = torch.where(live, start[..., None] + slot, 0)
    gain = logits.gather(-1, torch.where(live, trie.code[child], 0)).float()
    if node_filter is not None:
        request = torch.arange(len(child), device=device)[:, None, None]
        live = live & is_allowed(child, request, node_filter, len(trie.code))
    lse = _children_normalizer(gain, live) if normalizer is None else normalizer.float()
    score = beams.score.float()[..., None] + (gain - lse[..., None])
    key = torch.where(live, (_ordered_bits(score) << 32) | (0xFFFFFFFF - child), _NONE).flatten(1)
    short = max(width - key.shape[1], 0)
    best, place = torch.nn.functional.pad(key, (0, short), value=_NONE).topk(width, dim=1)
    kept = (best != _NONE) & (torch.arange(width, device=device) < widths[:, None])
    place = torch.where(kept, place, 0)
    return Beams(
        score=torch.where(kept, score.flatten(1).gather(1, place), DEAD),
        node=torch.where(kept, 0xFFFFFFFF - (best & 0xFFFFFFFF), 0),
        parent=torch.where(kept, place // num_codes, 0),
    )


def _children_normalizer(gain: Tensor, live: Tensor) -> Tensor:
    """log-sum-exp of the living slots, fp32 [R, W]; a row without any has none, and is never read."""
    return torch.where(live, gain, DEAD).logsumexp(-1)


def _ordered_bits(score: Tensor) -> Tensor:
    """fp32 -> int64 in the same order; the two zeros are one number."""
    bits = score.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


CUDA_LIKE_SEARCH_OPS = replace(REFERENCE_SEARCH_OPS, beam_step=beam_step)
