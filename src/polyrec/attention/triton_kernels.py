"""Triton kernels of attention: packed sequences against their own keys, and query rows against a prompt in the cache.

A cache has rows [slots, kv heads, D], in pages that a table names, or packed. What a program does is listed (`triton_work`); it
never looks beyond its own request.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..hardware.backends.cuda_like.kernels.early import let_next_begin, wait_for_earlier
from .triton_work import (
    BEFORE,
    BEGIN,
    END,
    FIRST_ROW,
    ITEM_SIZE,
    OUT,
    REQUEST,
    ROWS_OF,
    TILE,
)

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
TWO_LOG2E: tl.constexpr = tl.constexpr(2.8853900817779268)
NEVER: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def _capped(scores, soft_cap, CAPPED: tl.constexpr):
    """The scores, soft-capped where a model does that: tanh by its exponential."""
    if CAPPED:
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * TWO_LOG2E / soft_cap) + 1.0))
    return scores


@triton.jit
def _attend(query, key, value, seen, top, total, acc, scale, soft_cap, MASKED: tl.constexpr, CAPPED: tl.constexpr):
    """One block of keys into the running softmax (Milakov and Gimelshein, 2018), in base 2. query [M, D], key [D, N].

    The work on each score weighs as much as the products: one multiplication and addition, where nothing is capped or hidden.
    """
    scores = tl.dot(query, key, input_precision="ieee")
    if CAPPED:
        scores = _capped(scores * scale, soft_cap, CAPPED)
        scale = 1.0
    if MASKED:
        scores = tl.where(seen, scores, NEVER)
    scale = scale * LOG2E
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(higher == NEVER, 0.0, higher)
    weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, total, acc


@triton.jit
def attend_own(
    q, k, v, top, total, acc, scale, soft_cap, distance, window, CAPPED: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """One own key and value of each row into the running softmax; all [M, D]. distance: tokens from it to the query."""
    scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
    scores = _capped(scores, soft_cap, CAPPED) * LOG2E
    if WINDOWED:
        scores = tl.where(distance < window, scores, NEVER)
    higher = tl.maximum(top, scores)
    base = tl.where(higher == NEVER, 0.0, higher)
    shrink, grow = tl.exp2(top - base), tl.exp2(scores - base)
    return higher, total * shrink + grow, acc * shrink[:, None] + v.to(tl.float32) * grow[:, None]


@triton.jit
def packed_kernel(
    query, key, value, result, items, count, scale, soft_cap, window,
    q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs (head, item): a tile of ROWS queries of a packed sequence attends causally to the sequence."""
    wait_for_earlier(EARLY)
    if tl.program_id(1) >= tl.load(count):
        return
    at = items + tl.program_id(1) * ITEM_SIZE
    block = tl.load(at + TILE)
    length = tl.load(at + ROWS_OF)
    first = tl.load(at + FIRST_ROW).to(tl.int64)
    head = tl.program_id(0)
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
            top, total, acc = _attend(q, k, v, True, top, total, acc, scale, soft_cap, False, CAPPED)
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
        top, total, acc = _attend(q, k, v, seen, top, total, acc, scale, soft_cap, True, CAPPED)
    let_next_begin(EARLY)
    acc *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    out = result + (token[:, None] * HEADS + head) * DIM + lane
    tl.store(out, acc.to(result.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _pages_of(number, end, request, pages, page_row, PAGE: tl.constexpr):
    """int32 [N], the pages of a prompt's tokens, of those before `end`; without PAGE nothing that is used."""
    if PAGE:
        number = tl.load(pages + request * page_row + number // PAGE, mask=number < end, other=0)
    return number


@triton.jit
def _rows_of(start, page, first, KEYS: tl.constexpr, PAGE: tl.constexpr, WHOLE: tl.constexpr, SIZE: tl.constexpr):
    """int64 [KEYS], where rows of SIZE numbers begin, of a prompt's tokens from `start` on: in pages, or from row `first` on.
    WHOLE: `start` is a page's first, so where the tokens lie in their pages is known when this is compiled."""
    number = tl.arange(0, KEYS)
    if PAGE:
        if not WHOLE:
            number += start % PAGE
        rows = page.to(tl.int64) * (PAGE * SIZE) + (number % PAGE * SIZE).to(tl.int64)
    else:
        rows = (first + start + number) * SIZE
    return rows


@triton.jit
def _item(items, item):
    """An item of the list: request, tile, first key of the span, the key behind its last, row of its partial results, query
    rows of the request, the first of them, keys before that."""
    at = items + item * ITEM_SIZE
    request = tl.load(at + REQUEST).to(tl.int64)
    first_query = tl.load(at + FIRST_ROW).to(tl.int64)
    return (
        request, tl.load(at + TILE), tl.load(at + BEGIN), tl.load(at + END), tl.load(at + OUT), tl.load(at + ROWS_OF),
        first_query, tl.load(at + BEFORE),
    )  # fmt: skip


@triton.jit
def rotated(x, at, inside, weight, cos, sin, eps, DIM: tl.constexpr):
    """Heads [M, DIM] at `x` + `at` [M], normalised and rotated by a token's cos and sin [DIM / 2], rounded as they are kept;
    what `rope.qk_norm_rotary` gives, but for the order of sums and factors."""
    HALF: tl.constexpr = DIM // 2
    lane = tl.arange(0, HALF)
    low = tl.load(x + at[:, None] + lane, mask=inside[:, None], other=0.0)
    high = tl.load(x + at[:, None] + HALF + lane, mask=inside[:, None], other=0.0)
    low_gain, high_gain = tl.load(weight + lane).to(tl.float32), tl.load(weight + HALF + lane).to(tl.float32)
    cosine, sine = tl.load(cos + lane).to(tl.float32), tl.load(sin + lane).to(tl.float32)
    first, second = low.to(tl.float32), high.to(tl.float32)
    square = tl.sum(first * first + second * second, 1)
    inverse = tl.rsqrt(square / DIM + eps)[:, None]
    # What a row's values are multiplied by but for its norm: a few numbers a thread, which all of its rows share.
    turned = (
        ((first * (low_gain * cosine) - second * (high_gain * sine)) * inverse).to(low.dtype),
        ((second * (high_gain * cosine) + first * (low_gain * sine)) * inverse).to(low.dtype),
    )
    return tl.join(turned[0], turned[1]).permute(0, 2, 1).reshape(low.shape[0], DIM)


@triton.jit(do_not_specialize=["page_row", "step_rows"])
def prompt_kernel(
    query, keys, values, result, items, count, starts, pages, part, part_top,
    key, value, suffix_keys, suffix_values, ancestors, q_weight, cos, sin,
    page_row, step_rows, k_row, k_head, v_row, v_head, window, eps, scale, soft_cap, q_row, q_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, OWN: tl.constexpr, CUT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    ROTATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs (every num_programs-th item, kv head): a tile of GROUP query rows a query against a span of its prompt.

    OWN 0: queries are a prompt's last tokens; else beams, which have so many tokens of their own behind the prompt, as in
    `merge_kernel`. PAGE: tokens of a page; prompt r has `pages` int32 [R, page_row]; 0: it lies in slots from starts[r] on.
    part: [rows, heads, DIM], what the span alone would give; part_top: fp32 [rows, heads], the logarithm of its softmax's sum,
    in base 2. With CUT all beams' results go there; without it they go to the result, with own tokens. Of a prompt's last
    tokens, what is not cut goes to the result. ROTATE: queries are as they leave the product; a request's beams are all new in
    the same place, so one row's cos and sin are every one's.
    """
    wait_for_earlier(EARLY)
    CAUSAL: tl.constexpr = OWN == 0
    # Spans begin with a block, and blocks with a page, where no window moves them.
    ALIGNED: tl.constexpr = PAGE > 0 and KEYS % max(PAGE, 1) == 0 and not WINDOWED
    kv_heads: tl.constexpr = HEADS // GROUP
    kv_head = tl.program_id(1)
    lane = tl.arange(0, DIM)
    item = tl.program_id(0)
    bound = tl.load(count)  # not waited for until the item is there too
    request, tile, begin, end, out, num_rows, first_query, before = _item(items, item)
    while item < bound:
        num_rows *= GROUP
        first_row = tile * ROWS
        row = first_row + tl.arange(0, ROWS)
        inside = row < num_rows
        token = first_query + row // GROUP
        head = kv_head * GROUP + row % GROUP
        if ROTATE:
            turn = first_query * (DIM // 2)
            q = rotated(query, token * q_row + head * q_head, inside, q_weight, cos + turn, sin + turn, eps, DIM)
        else:
            q = tl.load(query + token[:, None] * q_row + head[:, None] * q_head + lane, mask=inside[:, None], other=0.0)
        top = tl.full([ROWS], NEVER, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        if CAUSAL:
            position = before + row // GROUP
            end = tl.minimum(end, before + (tl.minimum(first_row + ROWS, num_rows) - 1) // GROUP + 1)
            if WINDOWED:
                oldest = tl.maximum(before + first_row // GROUP - window + 1, 0)
                begin = tl.maximum(begin, oldest // KEYS * KEYS)
        elif WINDOWED:
            begin = tl.maximum(begin, before + OWN - window)
        # Pages are looked up a block ahead: where they are known its keys need not wait for them.
        page = _pages_of(begin + tl.arange(0, KEYS), end, request, pages, page_row, PAGE)
        first = tl.load(starts + request) if PAGE == 0 else request
        k_at = keys + kv_head * DIM + lane[None, :]
        v_at = values + kv_head * DIM + lane[None, :]
        # Blocks of which every key is there, and seen by every query, need no mask.
        whole = begin
        if not WINDOWED:
            whole = end
            if CAUSAL:
                whole = tl.minimum(end, before + first_row // GROUP)
            whole = begin + tl.maximum(whole - begin, 0) // KEYS * KEYS
            for start in range(begin, whole, KEYS):
                number = start + tl.arange(0, KEYS)
                place = _rows_of(start, page, first, KEYS, PAGE, ALIGNED, kv_heads * DIM)[:, None]
                page = _pages_of(number + KEYS, end, request, pages, page_row, PAGE)
                k = tl.load(k_at + place).to(q.dtype)
                v = tl.load(v_at + place).to(q.dtype)
                top, total, acc = _attend(q, tl.trans(k), v, True, top, total, acc, scale, soft_cap, False, CAPPED)
        for start in range(whole, end, KEYS):
            number = start + tl.arange(0, KEYS)
            there = number < end
            place = _rows_of(start, page, first, KEYS, PAGE, ALIGNED, kv_heads * DIM)[:, None]
            page = _pages_of(number + KEYS, end, request, pages, page_row, PAGE)
            k = tl.load(k_at + place, mask=there[:, None], other=0.0).to(q.dtype)
            v = tl.load(v_at + place, mask=there[:, None], other=0.0).to(q.dtype)
            seen = there[None, :]
            if CAUSAL:
                seen = seen & (number[None, :] <= position[:, None])
                if WINDOWED:
                    seen = seen & (position[:, None] - number[None, :] < window)
            top, total, acc = _attend(q, tl.trans(k), v, seen, top, total, acc, scale, soft_cap, True, CAPPED)
        if OWN > 0 and not CUT:
            for step in tl.static_range(OWN):
                if step < OWN - 1:
                    earlier = tl.load(ancestors + token * (OWN - 1) + step, mask=inside, other=0)
                    own = ((step * step_rows + earlier) * kv_heads + kv_head)[:, None] * DIM + lane
                    k = tl.load(suffix_keys + own, mask=inside[:, None], other=0.0)
                    v = tl.load(suffix_values + own, mask=inside[:, None], other=0.0)
                else:
                    k = tl.load(
                        key + (token * k_row + kv_head * k_head)[:, None] + lane, mask=inside[:, None], other=0.0
                    )
                    v = tl.load(
                        value + (token * v_row + kv_head * v_head)[:, None] + lane, mask=inside[:, None], other=0.0
                    )
                top, total, acc = attend_own(
                    q, k, v, top, total, acc, scale, soft_cap, OWN - 1 - step, window, CAPPED, WINDOWED
                )
        item += tl.num_programs(0)
        if item >= bound:
            let_next_begin(EARLY)
        acc *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        if CUT and (OWN > 0 or out >= 0):
            apart = (out.to(tl.int64) + row // GROUP) * HEADS + head
            tl.store(part + apart[:, None] * DIM + lane, acc.to(part.dtype.element_ty), mask=inside[:, None])
            tl.store(part_top + apart, top + tl.log2(total), mask=inside)
        else:
            to = (token * HEADS + head)[:, None] * DIM + lane
            tl.store(result + to, acc.to(result.dtype.element_ty), mask=inside[:, None])
        if item < bound:
            request, tile, begin, end, out, num_rows, first_query, before = _item(items, item)
