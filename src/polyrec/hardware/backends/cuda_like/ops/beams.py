"""The search's operations through Triton: the beam step's work follows the trie's fan-out, and nothing is synchronised."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....ops.search import Beams, NodeFilter, PassRows, SearchOps, TrieArrays
from ....ops.search import next_rows as reference_next_rows
from ....ops.search import restricted_log_softmax as reference_restricted_log_softmax
from .launch import kernels, runs_kernel
from .search import CUDA_LIKE_SEARCH_OPS
from .search import beam_step as torch_beam_step

LANES_LOG = 5
LEAST_KEPT = 1 << LANES_LOG  # a list begins along the lanes of a warp
BLOCK = 512  # candidates that a program sorts at a time; more where it keeps more
TILE = 4096  # values that a program merges at a time, of one list at least
MAX_SPLITS = 128  # programs that sort the candidates of one request
ENOUGH_SPLITS = 64  # where one program merges the lists of so many, there are no more
PROGRAMS = 1024  # eight on each multiprocessor of an H200
KEPT_VALUES = 1 << 18  # in the lists of all programs, so that long lists come from fewer
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
    slot_bits = log_of(num_codes)
    fits = max(num_beams, width) <= MAX_BEAMS and log_of(num_beams) + slot_bits <= 32
    if not runs_kernel(logits) or not fits:
        return torch_beam_step(logits, normalizer, beams, trie, node_filter, widths, width)
    search, early, device = kernels("search"), kernels("early").early(), logits.device
    logits, score, node = logits.contiguous(), beams.score.float().contiguous(), beams.node.contiguous()
    some = node_filter
    listed = (node, node, node) if some is None else (some.nodes, some.ends, some.allow)
    filtered = {"FILTERED": some is not None}
    offsets = torch.empty((requests, num_beams + 1), dtype=torch.int32, device=device)
    order = torch.empty((requests, num_beams), dtype=torch.int32, device=device)
    begins = torch.empty((requests, num_beams), dtype=torch.int64, device=device)
    search.count_kernel[(requests,)](
        score, node, trie.first_child, offsets, order, begins, num_beams, LOG=max(log_of(num_beams), 1),
        **early, num_warps=warps_of(num_beams),
    )  # fmt: skip
    if normalizer is None:
        normalizer = torch.empty((requests, num_beams), dtype=torch.float32, device=device)
        search.children_kernel[(requests * num_beams,)](
            logits, node, score, trie.first_child, trie.code, *listed, normalizer, num_beams, num_codes,
            BLOCK=256, **filtered, **early,
        )  # fmt: skip
    lists = plan_lists(requests, num_beams * num_codes, width)
    partial = torch.empty((requests, lists.splits, lists.keep), dtype=torch.int64, device=device)
    search.select_kernel[(requests, lists.splits)](
        logits, normalizer.float().contiguous(), score, trie.code, offsets, order, begins, *listed, partial,
        num_beams, log_of(num_beams), num_codes, lists.splits, SLOT_BITS=slot_bits,
        **shape_of(lists.block, lists.keep, warps_of(lists.block)), **filtered, **early,
    )  # fmt: skip
    merged, warps = partial, warps_of(lists.keep)
    numbers = (lists.splits, lists.groups, lists.share, lists.direct)
    if lists.groups > 0:
        merged = torch.empty((requests, lists.groups, lists.keep), dtype=torch.int64, device=device)
        at_once = min(lists.share, lists.at_once)
        search.select_in_groups_kernel[(requests, lists.groups)](
            partial, offsets, merged, num_beams, *numbers, BLOCK=lists.block, CHAIN=lists.share > at_once,
            **shape_of(at_once * lists.keep, lists.keep, warps), **early,
        )  # fmt: skip
    found = Beams(
        score=torch.empty((requests, width), dtype=torch.float32, device=device),
        node=torch.empty((requests, width), dtype=torch.int64, device=device),
        parent=torch.empty((requests, width), dtype=torch.int64, device=device),
    )
    at_once = min(power_of_two(lists.direct), lists.at_once)
    search.select_of_splits_kernel[(requests,)](
        partial, merged, offsets, order, begins, widths, found.score, found.node, found.parent, num_beams, width, *numbers,
        BLOCK=lists.block, SLOT_BITS=slot_bits, CHAIN=lists.direct > at_once,
        **shape_of(at_once * lists.keep, lists.keep, warps), **early,
    )  # fmt: skip
    return found


@dataclass(frozen=True)
class Lists:
    """How the candidates of a request become one list. `splits` programs sort blocks of `block` and keep `keep` of all theirs.
    Where more than `direct` of them found any, `groups` programs (0: none) merge `share` lists each, and a last program merges
    what they made; else it merges all. A program merges `at_once` lists at a time."""

    keep: int
    block: int
    at_once: int
    splits: int
    groups: int
    share: int
    direct: int


def plan_lists(requests: int, candidates: int, width: int) -> Lists:
    """candidates: of a request, at most; how many there are is only known on the device."""
    keep = max(power_of_two(width), LEAST_KEPT)
    block, at_once = max(keep, BLOCK), max(TILE // keep, 1)
    most = at_once if at_once >= ENOUGH_SPLITS else MAX_SPLITS
    splits = max(min(most, PROGRAMS // requests, KEPT_VALUES // (keep * requests), -(-candidates // block)), 1)
    if splits <= at_once:
        return Lists(keep, block, at_once, splits, groups=0, share=1, direct=splits)
    share = max(at_once, power_of_two(math.isqrt(splits)))
    groups = -(-splits // share)
    return Lists(keep, block, at_once, splits, groups, share, direct=max(groups, at_once))


def shape_of(values: int, keep: int, warps: int) -> dict[str, int]:
    """Of a program whose `warps` hold so many values in lists of `keep`: the options of its kernel, logarithms all."""
    log, keep_log = log_of(values), log_of(keep)
    held = max(log - LANES_LOG - log_of(warps), 0)
    keep_held = min(held, keep_log - LANES_LOG)
    return {"LOG": log, "HELD": held, "KEEP_LOG": keep_log, "KEEP_HELD": keep_held, "num_warps": warps}


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
        COLUMNS=columns, BLOCK=128, **kernels("early").early(),
    )  # fmt: skip
    return rows


def restricted_log_softmax(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`SearchOps.restricted_log_softmax`; half-precision products keep their fp32 sums."""
    if not runs_kernel(hidden, weight) or hidden.dtype == torch.float32:
        return reference_restricted_log_softmax(hidden, weight)
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    lse = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
    kernels("search").log_sum_exp_kernel[(len(rows),)](
        logits, lse, weight.shape[0], BLOCK=2048, **kernels("early").early()
    )
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
    return min(max(power_of_two(values) // 128, 4), 16)


def search_ops() -> SearchOps:
    """The group with the kernels."""
    return replace(
        CUDA_LIKE_SEARCH_OPS,
        beam_step=beam_step,
        next_rows=next_rows,
        restricted_log_softmax=restricted_log_softmax,
    )
