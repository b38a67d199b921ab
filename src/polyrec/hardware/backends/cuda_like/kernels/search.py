"""Triton kernels of one beam step on a CSR trie of any size and fan-out: count, select in parallel, merge; then what the kept
beams run.

A candidate is a number c in 0…total − 1 of its request: beams in the order of their nodes, children in order. Children of a
lower node have lower numbers, so c orders candidates as their nodes do, and so do a beam's place in that order and the child's
among its siblings. One int64 holds both below the score and sorts exactly as "higher score, then lower SID"; no two are
equal, so lists merge to the same bits in any order. Only children that exist are looked at: the work follows the fan-out, not
the codebook. How many there are is only known on the device: programs that find none end at once, and nobody reads their lists.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bitonic import best_row, cube_of, merge_rows, sequence_of, sort_rows
from .early import let_next_begin, wait_for_earlier

NONE: tl.constexpr = tl.constexpr(-(2**63))  # below every candidate's key
DEAD: tl.constexpr = tl.constexpr(float("-inf"))
LOW: tl.constexpr = tl.constexpr(0xFFFFFFFF)
NO_NODE: tl.constexpr = tl.constexpr(1 << 40)  # above every node
BEAM_BITS: tl.constexpr = tl.constexpr(20)
BEAM_MASK: tl.constexpr = tl.constexpr((1 << 20) - 1)


@triton.jit(do_not_specialize=["num_beams"])
def count_kernel(score, node, first_child, offsets, order, begins, num_beams, LOG: tl.constexpr, EARLY: tl.constexpr):
    """One program per request: beams by node -> order int32 [R, W], begins int64 [R, W] (their first children), offsets int32
    [R, W + 1] (candidates before each)."""
    wait_for_earlier(EARLY)
    WIDTH: tl.constexpr = 1 << LOG
    request = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    inside = place < num_beams
    own_score = tl.load(score + request * num_beams + place, mask=inside, other=DEAD)
    own_node = tl.load(node + request * num_beams + place, mask=inside, other=0).to(tl.int64)
    live = own_score != DEAD
    # Dead beams go last: their count is zero, and so is what stands behind them.
    packed = tl.reshape(-((tl.where(live, own_node, NO_NODE) << BEAM_BITS) | place), [2] * LOG)
    packed = -tl.reshape(sort_rows(packed, cube_of(LOG, 0), LOG, LOG, 0), [WIDTH])
    beam = packed & BEAM_MASK
    parent = packed >> BEAM_BITS
    live = parent < NO_NODE
    begin = tl.load(first_child + parent, mask=live, other=0).to(tl.int64)
    end = tl.load(first_child + parent + 1, mask=live, other=0).to(tl.int64)
    before = tl.cumsum((end - begin).to(tl.int32), 0)
    let_next_begin(EARLY)
    tl.store(order + request * num_beams + place, beam.to(tl.int32), mask=inside)
    tl.store(begins + request * num_beams + place, begin, mask=inside)
    tl.store(offsets + request * (num_beams + 1) + 1 + place, before, mask=inside)
    tl.store(offsets + request * (num_beams + 1), 0)


@triton.jit
def _beam_of(candidate, offsets, num_beams, num_steps):
    """The last place whose offset is not above the candidate, by bisection."""
    low = tl.zeros_like(candidate)
    high = tl.zeros_like(candidate) + (num_beams - 1)
    for _ in range(num_steps):
        middle = (low + high + 1) // 2
        right = tl.load(offsets + middle) <= candidate
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle - 1)
    return low


@triton.jit
def _listed_of(request, ends, allow, FILTERED: tl.constexpr):
    """Where the nodes that are listed for a request begin and end, and whether only they live."""
    begin, end, only = 0, 0, False
    if FILTERED:
        begin = tl.load(ends + request - 1, mask=request > 0, other=0)
        end = tl.load(ends + request)
        only = tl.load(allow + request) != 0
    return begin, end, only


@triton.jit
def _is_allowed(child, nodes, begin, end, only, valid):
    """Whether the request may use the node: bisection for the first listed one that is not below it. Nothing of that is done
    where none is listed, as for most requests."""
    if end > begin:
        low = tl.zeros_like(child) + begin
        high = tl.zeros_like(child) + end
        left = end - begin
        while left > 0:
            middle = (low + high) // 2
            below = tl.load(nodes + middle, mask=valid & (middle < end), other=0) < child
            open_ = low < high
            low = tl.where(open_ & below, middle + 1, low)
            high = tl.where(open_ & ~below, middle, high)
            left = left // 2
        found = valid & (low < end)
        found &= tl.load(nodes + low, mask=found, other=0) == child
        kept = found == only
    else:
        kept = valid & (only == 0)
    return kept


@triton.jit
def children_kernel(
    logits, node, score, first_child, code, nodes, ends, allow, result, num_beams, num_codes,
    BLOCK: tl.constexpr, FILTERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per beam: log-sum-exp over the children that the request may use -> result fp32 [R, W]."""
    wait_for_earlier(EARLY)
    row = tl.program_id(0).to(tl.int64)
    request = row // num_beams
    listed_from, listed_to, only = _listed_of(request, ends, allow, FILTERED)
    own = tl.load(node + row)
    begin = tl.load(first_child + own)
    end = tl.load(first_child + own + 1)
    if tl.load(score + row) == DEAD:
        end = begin
    top = tl.full([BLOCK], DEAD, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        child = start + tl.arange(0, BLOCK)
        valid = child < end
        gain = tl.load(logits + row * num_codes + tl.load(code + child, mask=valid, other=0), mask=valid, other=DEAD)
        if FILTERED:
            valid &= _is_allowed(child, nodes, listed_from, listed_to, only, valid)
        gain = tl.where(valid, gain.to(tl.float32), DEAD)
        higher = tl.maximum(top, gain)
        scale = tl.where(top == DEAD, 0.0, tl.exp(top - higher))
        total = total * scale + tl.where(gain == DEAD, 0.0, tl.exp(gain - higher))
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(tl.where(top == DEAD, 0.0, total * tl.exp(top - highest)), 0)
    let_next_begin(EARLY)
    tl.store(result + row, highest + tl.log(total))


@triton.jit(do_not_specialize=["num_beams", "num_steps", "num_codes", "num_splits"])
def select_kernel(
    logits, normalizer, score, code, offsets, order, begins, nodes, ends, allow, partial,
    num_beams, num_steps, num_codes, num_splits,
    LOG: tl.constexpr, HELD: tl.constexpr, KEEP_LOG: tl.constexpr, KEEP_HELD: tl.constexpr,
    SLOT_BITS: tl.constexpr, FILTERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs (request, split): of every num_splits-th block of 2^LOG candidates the best 2^KEEP_LOG, falling -> partial
    [R, splits, KEEP]."""
    wait_for_earlier(EARLY)
    BLOCK: tl.constexpr = 1 << LOG
    KEEP: tl.constexpr = 1 << KEEP_LOG
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    listed_from, listed_to, only = _listed_of(request, ends, allow, FILTERED)
    offsets += request * (num_beams + 1)
    order += request * num_beams
    begins += request * num_beams
    # The last offset is the largest. The others are read with it, so that the bisection finds them in a cache nearby.
    some = tl.arange(0, KEEP)
    others = tl.max(tl.load(offsets + some, mask=some < num_beams, other=0), 0)
    total = tl.maximum(tl.load(offsets + num_beams), others)
    place = sequence_of(tl.arange(0, BLOCK), LOG, HELD)
    best = tl.full([2] * KEEP_LOG, NONE, tl.int64)
    for first in range(split * BLOCK, total, num_splits * BLOCK):
        # A thread's loads of one step shall be under way together. ptxas waits for each of them before the next where they
        # have masks, or where the next step may begin. So past the end is the last candidate again, and barriers part steps.
        candidate = tl.minimum(first + place, total - 1)
        valid = first + place < total
        ordinal = _beam_of(candidate, offsets, num_beams, num_steps)
        beam, before, begin = tl.load(order + ordinal), tl.load(offsets + ordinal), tl.load(begins + ordinal)
        tl.debug_barrier()
        row, slot = request * num_beams + beam, candidate - before
        child = begin + slot
        token = tl.load(code + child).to(tl.int64)
        own, lse = tl.load(score + row), tl.load(normalizer + row)
        tl.debug_barrier()
        gain = tl.load(logits + row * num_codes + token).to(tl.float32)
        if FILTERED:
            valid &= _is_allowed(child, nodes, listed_from, listed_to, only, valid)
        tl.debug_barrier()
        value = own + (gain - lse)
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
        ordered = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
        number = (ordinal.to(tl.int64) << SLOT_BITS) | slot.to(tl.int64)
        key = tl.where(valid, (ordered << 32) | (LOW - number), NONE)
        odd = tl.minimum(first - split * BLOCK, 1)  # 0: the split's first block, which is its best so far
        worth = True
        if odd:
            worth = tl.max(key, 0) > tl.min(tl.reshape(best, [KEEP]), 0)
        if worth:
            values = tl.reshape(key, [2] * LOG)
            values = sort_rows(values, cube_of(LOG, HELD) + (odd << LOG), KEEP_LOG, LOG, HELD)
            num_rows = (tl.minimum(total - first, BLOCK) + KEEP - 1) // KEEP
            values = best_row(values, num_rows, odd, KEEP_LOG, LOG, HELD)
            if odd:
                values = merge_rows(tl.maximum(best, values), True, KEEP_LOG, KEEP_LOG, KEEP_HELD)
            best = values
    let_next_begin(EARLY)
    if split * BLOCK < total:
        partial += (request * num_splits + split) * KEEP
        tl.store(partial + sequence_of(tl.arange(0, KEEP), KEEP_LOG, KEEP_HELD), tl.reshape(best, [KEEP]))


@triton.jit
def _best_of_lists(
    lists, first, end,
    LOG: tl.constexpr, HELD: tl.constexpr, KEEP_LOG: tl.constexpr, KEEP_HELD: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The best of the lists first…end − 1, falling. CHAIN: they are more than 2^LOG values, which are merged at once."""
    LISTS: tl.constexpr = 1 << (LOG - KEEP_LOG)
    KEEP: tl.constexpr = 1 << KEEP_LOG
    place = sequence_of(tl.arange(0, 1 << LOG), LOG, HELD)
    own, at = place >> KEEP_LOG, place & (KEEP - 1)
    best = tl.full([2] * KEEP_LOG, NONE, tl.int64)
    if CHAIN:
        for start in range(first, end, LISTS):
            odd = tl.minimum(start - first, 1)
            turned = ((own & 1) if LOG > KEEP_LOG else odd) * (KEEP - 1)
            values = tl.load(lists + (start + own) * KEEP + (at ^ turned), mask=start + own < end, other=NONE)
            values = tl.reshape(values, [2] * LOG)
            values = best_row(values, end - start, odd, KEEP_LOG, LOG, HELD)
            if odd:
                values = merge_rows(tl.maximum(best, values), True, KEEP_LOG, KEEP_LOG, KEEP_HELD)
            best = values
    else:
        turned = (own & 1) * (KEEP - 1)
        values = tl.load(lists + (first + own) * KEEP + (at ^ turned), mask=first + own < end, other=NONE)
        best = best_row(tl.reshape(values, [2] * LOG), end - first, 0, KEEP_LOG, LOG, HELD)
    return best


@triton.jit(do_not_specialize=["num_beams", "num_splits", "num_groups", "share", "direct"])
def select_in_groups_kernel(
    partial, offsets, merged, num_beams, num_splits, num_groups, share, direct, BLOCK: tl.constexpr,
    LOG: tl.constexpr, HELD: tl.constexpr, KEEP_LOG: tl.constexpr, KEEP_HELD: tl.constexpr, CHAIN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Programs (request, group): the best of `share` lists -> merged [R, groups, KEEP]; nothing where `direct` hold all."""
    wait_for_earlier(EARLY)
    KEEP: tl.constexpr = 1 << KEEP_LOG
    request = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * share
    total = tl.load(offsets + request * (num_beams + 1) + num_beams)
    num_lists = tl.minimum((total + BLOCK - 1) // BLOCK, num_splits)
    if (num_lists > direct) & (first < num_lists):
        partial += request * num_splits * KEEP
        end = tl.minimum(first + share, num_lists)
        best = _best_of_lists(partial, first, end, LOG, HELD, KEEP_LOG, KEEP_HELD, CHAIN)
        let_next_begin(EARLY)
        merged += (request * num_groups + tl.program_id(1)) * KEEP
        tl.store(merged + sequence_of(tl.arange(0, KEEP), KEEP_LOG, KEEP_HELD), tl.reshape(best, [KEEP]))


@triton.jit(do_not_specialize=["num_beams", "width", "num_splits", "num_groups", "share", "direct"])
def select_of_splits_kernel(
    partial, merged, offsets, order, begins, widths, out_score, out_node, out_parent,
    num_beams, width, num_splits, num_groups, share, direct, BLOCK: tl.constexpr, SLOT_BITS: tl.constexpr,
    LOG: tl.constexpr, HELD: tl.constexpr, KEEP_LOG: tl.constexpr, KEEP_HELD: tl.constexpr, CHAIN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request: the best of all lists -> score, node and parent [R, width]; what it may not keep is dead."""
    wait_for_earlier(EARLY)
    KEEP: tl.constexpr = 1 << KEEP_LOG
    request = tl.program_id(0).to(tl.int64)
    may_keep = tl.load(widths + request)
    total = tl.load(offsets + request * (num_beams + 1) + num_beams)
    num_lists = tl.minimum((total + BLOCK - 1) // BLOCK, num_splits)
    lists = partial + request * num_splits * KEEP
    if num_lists > direct:
        lists = merged + request * num_groups * KEEP
        num_lists = (num_lists + share - 1) // share
    best = tl.reshape(_best_of_lists(lists, 0, num_lists, LOG, HELD, KEEP_LOG, KEEP_HELD, CHAIN), [KEEP])
    let_next_begin(EARLY)
    best = tl.gather(best, tl.arange(0, KEEP), 0)  # moved once: else Triton moves everything that is computed from it
    place = sequence_of(tl.arange(0, KEEP), KEEP_LOG, KEEP_HELD)
    kept = (best != NONE) & (place < may_keep)
    number = tl.where(kept, LOW - (best & LOW), 0)
    ordinal, slot = request * num_beams + (number >> SLOT_BITS), number & ((1 << SLOT_BITS) - 1)
    beam = tl.load(order + ordinal, mask=kept, other=0)
    child = tl.load(begins + ordinal, mask=kept, other=0) + slot
    ordered = best >> 32
    bits = tl.where(ordered < 0, (-ordered) | 0x80000000, ordered).to(tl.int32)
    inside = place < width
    out = request * width + place
    tl.store(out_score + out, tl.where(kept, bits.to(tl.float32, bitcast=True), DEAD), mask=inside)
    tl.store(out_node + out, tl.where(kept, child, 0), mask=inside)
    tl.store(out_parent + out, tl.where(kept, beam.to(tl.int64), 0), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "width", "old_width", "level_start"])
def next_rows_kernel(
    node, parent, ancestors, code, prompt_lengths, token_ids, positions, out,
    num_rows, width, old_width, level_start, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK beams a program. COLUMNS: of their ancestors, `out`; one less have those of the beams that they extend."""
    wait_for_earlier(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    request = row // width
    token = tl.load(code + tl.load(node + row, mask=inside, other=0), mask=inside, other=0)
    let_next_begin(EARLY)
    tl.store(token_ids + row, tl.maximum(token, 0).to(tl.int64) + level_start, mask=inside)
    tl.store(positions + row, tl.load(prompt_lengths + request, mask=inside, other=0) + COLUMNS, mask=inside)
    if COLUMNS > 0:
        old = request * old_width + tl.load(parent + row, mask=inside, other=0)
        out += row.to(tl.int64) * COLUMNS
        for column in tl.static_range(COLUMNS - 1):
            tl.store(out + column, tl.load(ancestors + old * (COLUMNS - 1) + column, mask=inside, other=0), mask=inside)
        tl.store(out + COLUMNS - 1, old, mask=inside)


@triton.jit
def log_sum_exp_kernel(logits, result, num_codes, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program per row of fp32 [N, C] -> fp32 [N]."""
    wait_for_earlier(EARLY)
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([BLOCK], DEAD, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_codes, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * num_codes + place, mask=place < num_codes, other=DEAD).to(tl.float32)
        higher = tl.maximum(top, value)
        total = total * tl.where(top == DEAD, 0.0, tl.exp(top - higher))
        total += tl.where(value == DEAD, 0.0, tl.exp(value - higher))
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(tl.where(top == DEAD, 0.0, total * tl.exp(top - highest)), 0)
    let_next_begin(EARLY)
    tl.store(result + row, highest + tl.log(total))
