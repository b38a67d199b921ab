"""Triton kernels of attention: packed sequences against their own keys, and beams against one shared copy of their prompt.

Prompt keys and values lie in a cache of rows [slots, kv heads, D], packed token t in slot t. A program never looks beyond its
own request: what a request gets does not depend on its neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
TWO_LOG2E: tl.constexpr = tl.constexpr(2.8853900817779268)
NEVER: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def _scores(query, key, scale, soft_cap, CAPPED: tl.constexpr):
    """query [M, D] · key [D, N], scaled and capped, in base 2."""
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if CAPPED:  # tanh by its exponential
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * TWO_LOG2E / soft_cap) + 1.0))
    return scores * LOG2E


@triton.jit
def _attend(scores, value, top, total, acc):
    """One block of keys into the running softmax (Milakov and Gimelshein, 2018)."""
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == NEVER, 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, total, acc


@triton.jit
def packed_kernel(
    query, key, value, result, starts, lengths, scale, soft_cap, window,
    q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Programs (block of ROWS queries, head, request): each packed sequence attends causally to itself."""
    # The last blocks have the most keys, so they begin first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2)
    length = tl.load(lengths + request).to(tl.int32)
    if block * ROWS >= length:
        return
    first = tl.load(starts + request).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, DIM)
    inside = row < length
    token = first + row
    q = tl.load(query + token[:, None] * q_row + head * q_head + lane, mask=inside[:, None], other=0.0)
    top = tl.full([ROWS], NEVER, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(block * ROWS - window + 1, 0) // KEYS * KEYS
    key += (head // GROUP) * k_head
    value += (head // GROUP) * v_head
    end = tl.minimum((block + 1) * ROWS, length)
    whole = block * ROWS // KEYS * KEYS  # below it every key of a block is before every query
    if not WINDOWED:
        for start in range(begin, whole, KEYS):
            place = first + start + tl.arange(0, KEYS)
            k = tl.load(key + place[None, :] * k_row + lane[:, None])
            v = tl.load(value + place[:, None] * v_row + lane[None, :])
            top, total, acc = _attend(_scores(q, k, scale, soft_cap, CAPPED), v, top, total, acc)
        begin = whole
    for start in range(begin, end, KEYS):
        number = start + tl.arange(0, KEYS)
        there = number < length
        place = first + number
        k = tl.load(key + place[None, :] * k_row + lane[:, None], mask=there[None, :], other=0.0)
        v = tl.load(value + place[:, None] * v_row + lane[None, :], mask=there[:, None], other=0.0)
        seen = (number[None, :] <= row[:, None]) & there[None, :]
        if WINDOWED:
            seen &= row[:, None] - number[None, :] < window
        scores = tl.where(seen, _scores(q, k, scale, soft_cap, CAPPED), NEVER)
        top, total, acc = _attend(scores, v, top, total, acc)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out = result + (token[:, None] * HEADS + head) * DIM + lane
    tl.store(out, acc.to(result.dtype.element_ty), mask=inside[:, None])


@triton.jit
def prompt_kernel(
    query, keys, values, starts, lengths, spans, part, part_top, part_total,
    width, window, scale, soft_cap, q_row, q_head, steps_after, num_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Programs (request · kv head, block of ROWS query rows, span): width · GROUP query rows against a span of one prompt.

    spans: int32 [R], tokens of a span. part: fp32 [spans, R · W, heads, DIM], not yet divided; part_top, part_total: fp32
    [spans, R · W, heads], the running softmax in base 2. Spans behind a prompt's end are not written, and not read.
    """
    kv_heads: tl.constexpr = HEADS // GROUP
    request = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(0) % kv_heads
    span = tl.program_id(2)
    length = tl.load(lengths + request).to(tl.int32)
    size = tl.load(spans + request)
    begin = span * size
    if begin >= length:
        return
    end = tl.minimum(begin + size, length)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < width * GROUP
    beam = request * width + row // GROUP
    head = kv_head * GROUP + row % GROUP
    lane = tl.arange(0, DIM)
    q = tl.load(query + beam[:, None] * q_row + head[:, None] * q_head + lane, mask=inside[:, None], other=0.0)
    top = tl.full([ROWS], NEVER, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    first = tl.load(starts + request).to(tl.int64)
    if WINDOWED:
        # The query stands steps_after tokens behind the prompt's last one.
        oldest = length - 1 + steps_after - window + 1
        begin = tl.maximum(begin, tl.maximum(oldest, 0))
    for start in range(begin, end, KEYS):
        number = start + tl.arange(0, KEYS)
        there = number < end
        place = ((first + number) * kv_heads + kv_head) * DIM
        k = tl.load(keys + place[None, :] + lane[:, None], mask=there[None, :], other=0.0).to(q.dtype)
        v = tl.load(values + place[:, None] + lane[None, :], mask=there[:, None], other=0.0).to(q.dtype)
        scores = tl.where(there[None, :], _scores(q, k, scale, soft_cap, CAPPED), NEVER)
        top, total, acc = _attend(scores, v, top, total, acc)
    out = (span * num_rows + beam) * HEADS + head
    tl.store(part + out[:, None] * DIM + lane, acc, mask=inside[:, None])
    tl.store(part_top + out, top, mask=inside)
    tl.store(part_total + out, total, mask=inside)


@triton.jit
def merge_kernel(
    query, key, value, part, part_top, part_total, lengths, spans, suffix_keys, suffix_values, ancestors, result,
    width, window, scale, soft_cap, q_row, q_head, k_row, k_head, v_row, v_head, num_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, EARLIER: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One program per beam: its prompt's spans, its EARLIER tokens (found through ancestors) and its own token, merged.

    suffix_keys, suffix_values: [steps, num_rows, kv heads, DIM]. ancestors: int64 [rows, EARLIER]. BLOCK: HEADS rounded up to a
    power of two.
    """
    kv_heads: tl.constexpr = HEADS // GROUP
    beam = tl.program_id(0).to(tl.int64)
    request = beam // width
    head = tl.arange(0, BLOCK)
    real = head < HEADS
    lane = tl.arange(0, DIM)
    tile = head[:, None] * DIM + lane
    q = tl.load(query + beam * q_row + head[:, None] * q_head + lane, mask=real[:, None], other=0.0).to(tl.float32)
    length = tl.load(lengths + request).to(tl.int32)
    num_spans = tl.cdiv(length, tl.load(spans + request))
    top = tl.full([BLOCK], NEVER, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DIM], tl.float32)
    for span in range(num_spans):
        at = (span * num_rows + beam) * HEADS
        other_top = tl.load(part_top + at + head, mask=real, other=NEVER)
        higher = tl.maximum(top, other_top)
        base = tl.where(higher == NEVER, 0.0, higher)
        shrink, grow = tl.exp2(top - base), tl.exp2(other_top - base)
        total = total * shrink + tl.load(part_total + at + head, mask=real, other=0.0) * grow
        acc = acc * shrink[:, None] + tl.load(part + at * DIM + tile, mask=real[:, None], other=0.0) * grow[:, None]
        top = higher
    of_kv = (head // GROUP)[:, None] * DIM + lane
    for step in tl.static_range(EARLIER + 1):
        if step < EARLIER:
            row = tl.load(ancestors + beam * EARLIER + step)
            at = (step * num_rows + row) * kv_heads * DIM
            k = tl.load(suffix_keys + at + of_kv, mask=real[:, None], other=0.0).to(tl.float32)
            v = tl.load(suffix_values + at + of_kv, mask=real[:, None], other=0.0).to(tl.float32)
        else:
            kv_head = (head // GROUP)[:, None]
            k = tl.load(key + beam * k_row + kv_head * k_head + lane, mask=real[:, None], other=0.0).to(tl.float32)
            v = tl.load(value + beam * v_row + kv_head * v_head + lane, mask=real[:, None], other=0.0).to(tl.float32)
        scores = tl.sum(q * k, 1) * scale
        if CAPPED:
            scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * TWO_LOG2E / soft_cap) + 1.0))
        scores = scores * LOG2E
        if WINDOWED:
            scores = tl.where(EARLIER - step < window, scores, NEVER)
        higher = tl.maximum(top, scores)
        base = tl.where(higher == NEVER, 0.0, higher)
        shrink, grow = tl.exp2(top - base), tl.exp2(scores - base)
        total = total * shrink + grow
        acc = acc * shrink[:, None] + v * grow[:, None]
        top = higher
    total = tl.where(real, total, 1.0)
    tl.store(result + beam * HEADS * DIM + tile, (acc / total[:, None]).to(result.dtype.element_ty), mask=real[:, None])
