"""The search's operations through Triton: the beam step's work follows the trie's fan-out, and nothing is synchronised."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....ops.search import Beams, NodeFilter, PassRows, SearchOps, TrieArrays
from ....ops.search import next_rows as reference_next_rows
from ....ops.search import restricted_log_softmax as reference_restricted_log_softmax
from .launch import kernels, runs_kernel
from .search import CUDA_LIKE_SEARCH_OPS
from .search import beam_step as torch_beam_step

MIN_KEPT = 512  # candidates of a block; fewer leave a multiprocessor's threads idle
MAX_SPLITS = 16
PROGRAMS = 264  # two per multiprocessor of an H200
MAX_BEAMS = 4096  # beams of a request that one program sorts


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
    if not runs_kernel(logits) or max(num_beams, width) > MAX_BEAMS:
        return torch_beam_step(logits, normalizer, beams, trie, node_filter, widths, width)
    search, device = kernels("search"), logits.device
    logits, score, node = logits.contiguous(), beams.score.float().contiguous(), beams.node.contiguous()
    keep, steps = max(power_of_two(width), MIN_KEPT), num_beams.bit_length()
    splits = max(1, min(MAX_SPLITS, PROGRAMS // requests, -(-num_beams * num_codes // keep)))
    if node_filter is None:
        listed, filtered = (node, node, 0, 0), {"FILTERED": False, "KEY_STEPS": 0}
    else:
        listed = (node_filter.keys, node_filter.allow, len(node_filter.keys), node_filter.stride)
        filtered = {"FILTERED": True, "KEY_STEPS": len(node_filter.keys).bit_length()}
    offsets = torch.empty((requests, num_beams + 1), dtype=torch.int32, device=device)
    order = torch.empty((requests, num_beams), dtype=torch.int32, device=device)
    search.count_kernel[(requests,)](
        score, node, trie.first_child, offsets, order, num_beams, WIDTH=power_of_two(num_beams),
        LOG=log_of(num_beams), num_warps=warps_of(power_of_two(num_beams)),
    )  # fmt: skip
    if normalizer is None:
        normalizer = torch.empty((requests, num_beams), dtype=torch.float32, device=device)
        search.children_kernel[(requests * num_beams,)](
            logits, node, score, trie.first_child, trie.code, *listed, normalizer, num_beams, num_codes,
            BLOCK=256, **filtered,
        )  # fmt: skip
    partial = torch.empty((requests, splits, keep), dtype=torch.int64, device=device)
    search.select_kernel[(requests, splits)](
        logits, normalizer.float().contiguous(), score, node, trie.first_child, trie.code, offsets, order, *listed, partial,
        num_beams, num_codes, splits, KEEP=keep, LOG=log_of(keep), STEPS=steps, num_warps=warps_of(keep), **filtered,
    )  # fmt: skip
    found = Beams(
        score=torch.empty((requests, width), dtype=torch.float32, device=device),
        node=torch.empty((requests, width), dtype=torch.int64, device=device),
        parent=torch.empty((requests, width), dtype=torch.int64, device=device),
    )
    search.select_of_splits_kernel[(requests,)](
        partial, node, trie.first_child, offsets, order, widths, found.score, found.node, found.parent,
        num_beams, width, splits, KEEP=keep, LOG=log_of(keep), STEPS=steps, num_warps=warps_of(keep),
    )  # fmt: skip
    return found


def next_rows(
    beams: Beams, ancestors: Tensor | None, code: Tensor, prompt_lengths: Tensor, level_start: int
) -> PassRows:
    """`SearchOps.next_rows`."""
    if not runs_kernel(code):
        return reference_next_rows(beams, ancestors, code, prompt_lengths, level_start)
    (requests, width), device = beams.node.shape, code.device
    old_width, old = (0, 0) if ancestors is None else (len(ancestors) // requests, ancestors.shape[1])
    columns, num_rows = 0 if ancestors is None else old + 1, requests * width
    node, parent = beams.node.contiguous(), beams.parent.contiguous()
    rows = PassRows(
        token_ids=torch.empty(num_rows, dtype=torch.int64, device=device),
        positions=torch.empty(num_rows, dtype=torch.int64, device=device),
        ancestors=torch.empty((num_rows, columns), dtype=torch.int64, device=device),
    )
    kernels("search").next_rows_kernel[(-(-num_rows // 128),)](
        node, parent, node if ancestors is None or not old else ancestors.contiguous(), code, prompt_lengths,
        rows.token_ids, rows.positions, rows.ancestors if columns else node, num_rows, width, old_width, level_start,
        COLUMNS=columns, BLOCK=128,
    )  # fmt: skip
    return rows


def restricted_log_softmax(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`SearchOps.restricted_log_softmax`; half-precision products keep their fp32 sums."""
    if not runs_kernel(hidden, weight) or hidden.dtype == torch.float32:
        return reference_restricted_log_softmax(hidden, weight)
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    lse = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
    kernels("search").log_sum_exp_kernel[(len(rows),)](logits, lse, weight.shape[0], BLOCK=2048)
    shape = hidden.shape[:-1]
    return logits.view(*shape, weight.shape[0]), lse.view(shape)


def power_of_two(number: int) -> int:
    """The first one that is not below `number`."""
    return 1 << log_of(number)


def log_of(number: int) -> int:
    """The exponent of `power_of_two(number)`."""
    return (number - 1).bit_length()


def warps_of(values: int) -> int:
    """Warps of a program that sorts so many values: four a thread, from 4 warps to 16."""
    return min(max(values // 128, 4), 16)


def search_ops() -> SearchOps:
    """The group with the kernels."""
    return replace(
        CUDA_LIKE_SEARCH_OPS,
        beam_step=beam_step,
        next_rows=next_rows,
        restricted_log_softmax=restricted_log_softmax,
    )
