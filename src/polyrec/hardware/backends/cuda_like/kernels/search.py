"""Triton kernels of one beam step on a CSR trie of any size and fan-out: count, select in parallel, merge; then what the kept
beams run.

A candidate is a number c in 0…total − 1 of its request: beams in the order of their nodes, children in order. Children of a
lower node have lower numbers, so c orders candidates as their nodes do, and one int64 (score above, c below) sorts exactly as
"higher score, then lower SID". Only children that exist are looked at: the work follows the fan-out, not the codebook.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE: tl.constexpr = tl.constexpr(-(2**63))  # below every candidate's key
DEAD: tl.constexpr = tl.constexpr(float("-inf"))
LOW: tl.constexpr = tl.constexpr(0xFFFFFFFF)
NO_NODE: tl.constexpr = tl.constexpr(1 << 40)  # above every node
BEAM_BITS: tl.constexpr = tl.constexpr(20)
BEAM_MASK: tl.constexpr = tl.constexpr((1 << 20) - 1)


@triton.jit
def _exchange(values, place, distance, rising):
    """One step of a bitonic network on [2^n]: of two values that lie `distance` apart, the smaller goes first where rising."""
    other = tl.gather(values, place ^ distance, 0)
    is_first = (place & distance) == 0
    return tl.where(is_first == rising, tl.minimum(values, other), tl.maximum(values, other))


@triton.jit
def _sort_rising(values, place, LOG: tl.constexpr):
    """A network of LOG · (LOG + 1) / 2 steps in loops that run on the device. `tl.sort` writes each step out: a search of 1,000
    beams compiled for 21 s with it, and compiles in 3 (two busy cores)."""
    for size in range(LOG):
        rising = (place & (2 << size)) == 0
        for step in range(size + 1):
            values = _exchange(values, place, 1 << (size - step), rising)
    return values


@triton.jit
def _best_falling(falling, rising, place, LOG: tl.constexpr):
    """The best 2^LOG of two sorted sequences, falling. The larger of each pair are the best of both and change direction once,
    so LOG steps sort them."""
    values = tl.maximum(falling, rising)
    for step in range(LOG):
        distance = 1 << (LOG - 1 - step)
        values = _exchange(values, place, distance, place < 0)
    return values


@triton.jit
def count_kernel(score, node, first_child, offsets, order, num_beams, WIDTH: tl.constexpr, LOG: tl.constexpr):
    """One program per request: beams by node -> order int32 [R, W], offsets int32 [R, W + 1] (candidates before each)."""
    request = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    inside = place < num_beams
    own_score = tl.load(score + request * num_beams + place, mask=inside, other=DEAD)
    own_node = tl.load(node + request * num_beams + place, mask=inside, other=0).to(tl.int64)
    live = own_score != DEAD
    # Dead beams go last: their count is zero, and so is what stands behind them.
    packed = _sort_rising((tl.where(live, own_node, NO_NODE) << BEAM_BITS) | place, place, LOG)
    beam = packed & BEAM_MASK
    parent = packed >> BEAM_BITS
    live = parent < NO_NODE
    begin = tl.load(first_child + parent, mask=live, other=0)
    end = tl.load(first_child + parent + 1, mask=live, other=0)
    before = tl.cumsum((end - begin).to(tl.int32), 0)
    tl.store(order + request * num_beams + place, beam.to(tl.int32), mask=inside)
    tl.store(offsets + request * (num_beams + 1) + 1 + place, before, mask=inside)
    tl.store(offsets + request * (num_beams + 1), 0)


@triton.jit
def _beam_of(candidate, offsets, num_beams, valid, STEPS: tl.constexpr):
    """The last place whose offset is not above the candidate, by bisection."""
    low = tl.zeros_like(candidate)
    high = tl.zeros_like(candidate) + (num_beams - 1)
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        right = tl.load(offsets + middle, mask=valid, other=0) <= candidate
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle - 1)
    return low


@triton.jit
def _is_allowed(child, request, keys, allow, num_keys, stride, valid, KEY_STEPS: tl.constexpr):
    """Whether the request may use the node: bisection for the first listed key that is not below it."""
    wanted = request * stride + child
    low = tl.zeros_like(wanted)
    high = tl.zeros_like(wanted) + num_keys
    for _ in tl.static_range(KEY_STEPS):
        middle = (low + high) // 2
        below = tl.load(keys + middle, mask=valid & (middle < num_keys), other=0) < wanted
        open_ = low < high
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
    listed = valid & (low < num_keys)
    listed &= tl.load(keys + low, mask=listed, other=0) == wanted
    return listed == (tl.load(allow + request) != 0)


@triton.jit
def children_kernel(
    logits, node, score, first_child, code, keys, allow, num_keys, stride, result, num_beams, num_codes,
    BLOCK: tl.constexpr, FILTERED: tl.constexpr, KEY_STEPS: tl.constexpr,
):  # fmt: skip
    """One program per beam: log-sum-exp over the children that the request may use -> result fp32 [R, W]."""
    row = tl.program_id(0).to(tl.int64)
    request = row // num_beams
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
            valid &= _is_allowed(child, request, keys, allow, num_keys, stride, valid, KEY_STEPS)
        gain = tl.where(valid, gain.to(tl.float32), DEAD)
        higher = tl.maximum(top, gain)
        scale = tl.where(top == DEAD, 0.0, tl.exp(top - higher))
        total = total * scale + tl.where(gain == DEAD, 0.0, tl.exp(gain - higher))
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(tl.where(top == DEAD, 0.0, total * tl.exp(top - highest)), 0)
    tl.store(result + row, highest + tl.log(total))


@triton.jit
def select_kernel(
    logits, normalizer, score, node, first_child, code, offsets, order, keys, allow, num_keys, stride, partial,
    num_beams, num_codes, num_splits,
    KEEP: tl.constexpr, LOG: tl.constexpr, STEPS: tl.constexpr, FILTERED: tl.constexpr, KEY_STEPS: tl.constexpr,
):  # fmt: skip
    """Programs (request, split): the best KEEP of every num_splits-th block of candidates -> partial [R, splits, KEEP]."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    offsets += request * (num_beams + 1)
    total = tl.load(offsets + num_beams)
    place = tl.arange(0, KEEP)
    best = tl.full([KEEP], NONE, tl.int64)
    for first in range(split * KEEP, total, num_splits * KEEP):
        candidate = first + place
        valid = candidate < total
        ordinal = _beam_of(candidate, offsets, num_beams, valid, STEPS)
        row = request * num_beams + tl.load(order + request * num_beams + ordinal, mask=valid, other=0)
        slot = candidate - tl.load(offsets + ordinal, mask=valid, other=0)
        child = tl.load(first_child + tl.load(node + row, mask=valid, other=0), mask=valid, other=0) + slot
        token = tl.load(code + child, mask=valid, other=0).to(tl.int64)
        gain = tl.load(logits + row * num_codes + token, mask=valid, other=0.0).to(tl.float32)
        if FILTERED:
            valid &= _is_allowed(child.to(tl.int64), request, keys, allow, num_keys, stride, valid, KEY_STEPS)
        lse = tl.load(normalizer + row, mask=valid, other=0.0)
        value = tl.load(score + row, mask=valid, other=0.0) + (gain - lse)
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
        ordered = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
        key = tl.where(valid, (ordered << 32) | (LOW - candidate.to(tl.int64)), NONE)
        if tl.max(key, 0) > tl.min(best, 0):
            best = _best_falling(best, _sort_rising(key, place, LOG), place, LOG)
    tl.store(partial + (request * num_splits + split) * KEEP + place, best)


@triton.jit
def select_of_splits_kernel(
    partial, node, first_child, offsets, order, widths, out_score, out_node, out_parent,
    num_beams, width, num_splits, KEEP: tl.constexpr, LOG: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program per request: the best of all splits -> score, node and parent [R, width]; what it may not keep is dead."""
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, KEEP)
    partial += request * num_splits * KEEP
    best = tl.load(partial + place)
    for split in range(1, num_splits):
        rising = tl.load(partial + split * KEEP + (KEEP - 1 - place))
        if tl.max(rising, 0) > tl.min(best, 0):
            best = _best_falling(best, rising, place, LOG)
    kept = (best != NONE) & (place < tl.load(widths + request))
    offsets += request * (num_beams + 1)
    candidate = tl.where(kept, LOW - (best & LOW), 0).to(tl.int32)
    ordinal = _beam_of(candidate, offsets, num_beams, kept, STEPS)
    beam = tl.load(order + request * num_beams + ordinal, mask=kept, other=0)
    parent_node = tl.load(node + request * num_beams + beam, mask=kept, other=0)
    slot = candidate - tl.load(offsets + ordinal, mask=kept, other=0)
    child = tl.load(first_child + parent_node, mask=kept, other=0).to(tl.int64) + slot
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
    num_rows, width, old_width, level_start, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK beams a program. COLUMNS: of their ancestors, `out`; one less have those of the beams that they extend."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    request = row // width
    token = tl.load(code + tl.load(node + row, mask=inside, other=0), mask=inside, other=0)
    tl.store(token_ids + row, tl.maximum(token, 0).to(tl.int64) + level_start, mask=inside)
    tl.store(positions + row, tl.load(prompt_lengths + request, mask=inside, other=0) + COLUMNS, mask=inside)
    if COLUMNS > 0:
        old = request * old_width + tl.load(parent + row, mask=inside, other=0)
        out += row.to(tl.int64) * COLUMNS
        for column in tl.static_range(COLUMNS - 1):
            tl.store(out + column, tl.load(ancestors + old * (COLUMNS - 1) + column, mask=inside, other=0), mask=inside)
        tl.store(out + COLUMNS - 1, old, mask=inside)


@triton.jit
def log_sum_exp_kernel(logits, result, num_codes, BLOCK: tl.constexpr):
    """One program per row of fp32 [N, C] -> fp32 [N]."""
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
    tl.store(result + row, highest + tl.log(total))
