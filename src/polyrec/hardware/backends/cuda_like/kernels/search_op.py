"""The beam step and the restricted head through Triton kernels: the work follows the trie's fan-out, and nothing is synchronised."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ....ops.search import Beams, NodeFilter, TrieArrays
from . import search as kernels

MIN_KEPT = 512  # a block of candidates; smaller ones leave a multiprocessor's threads idle
MAX_SPLITS = 16
PROGRAMS = 264  # two per multiprocessor of an H200


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
    requests, num_beams, num_codes = logits.shape
    device = logits.device
    logits, score, node = logits.contiguous(), beams.score.contiguous(), beams.node.contiguous()
    keep = max(triton.next_power_of_2(width), MIN_KEPT)
    steps = num_beams.bit_length()
    splits = max(1, min(MAX_SPLITS, PROGRAMS // requests, -(-num_beams * num_codes // keep)))
    filtered = node_filter is not None
    keys, allow, stride = (node_filter.keys, node_filter.allow, node_filter.stride) if node_filter else (node, node, 0)
    of_filter = (keys, allow, keys.numel() if filtered else 0, stride)
    key_steps = keys.numel().bit_length() if filtered else 0
    offsets = torch.empty((requests, num_beams + 1), dtype=torch.int32, device=device)
    order = torch.empty((requests, num_beams), dtype=torch.int32, device=device)
    beam_block = triton.next_power_of_2(num_beams)
    kernels.count_kernel[(requests,)](score, node, trie.first_child, offsets, order, num_beams, beam_block)
    if normalizer is None:
        normalizer = torch.empty((requests, num_beams), dtype=torch.float32, device=device)
        kernels.children_kernel[(requests * num_beams,)](
            logits, node, score, trie.first_child, trie.code, *of_filter, normalizer, num_beams, num_codes,
            BLOCK=256, FILTERED=filtered, KEY_STEPS=key_steps,
        )  # fmt: skip
    partial = torch.empty((requests, splits, keep), dtype=torch.int64, device=device)
    kernels.select_kernel[(requests, splits)](
        logits, normalizer.contiguous(), score, node, trie.first_child, trie.code, offsets, order, *of_filter, partial,
        num_beams, num_codes, splits,
        KEEP=keep, STEPS=steps, FILTERED=filtered, KEY_STEPS=key_steps,
    )  # fmt: skip
    found = Beams(
        score=torch.empty((requests, width), dtype=torch.float32, device=device),
        node=torch.empty((requests, width), dtype=torch.int64, device=device),
        parent=torch.empty((requests, width), dtype=torch.int64, device=device),
    )
    kernels.merge_kernel[(requests,)](
        partial, node, trie.first_child, offsets, order, widths, found.score, found.node, found.parent,
        num_beams, width, splits, KEEP=keep, STEPS=steps,
    )  # fmt: skip
    return found
