"""Triton kernels that finish attention: parts of a prompt's result merged, and beams' own tokens joined to it; rows may leave
quantised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..hardware.backends.cuda_like.kernels.e4m3 import scale_of, to_e4m3
from ..hardware.backends.cuda_like.kernels.early import let_next_begin, wait_for_earlier
from .triton_kernels import NEVER, attend_own, rotated
from .triton_work import FIRST_PART, PART_ROW, PART_ROWS, REQUEST_SIZE, SPANS


@triton.jit
def _own_tokens(
    row, head, real, key, value, suffix_keys, suffix_values, ancestors, k_weight, cos, sin,
    step_rows, k_row, k_head, v_row, v_head, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, OWN: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Keys and values [M, D] of the OWN tokens of one beam for some of its heads, of which `real` ones are there, oldest first.

    Earlier tokens are found through ancestors int64 [rows, OWN − 1] in suffix_keys, suffix_values [steps, step_rows, kv heads,
    DIM]; the new one is the row's, and with ROTATE its key is as it leaves the product.
    """
    lane = tl.arange(0, DIM)
    kv_head = (head // GROUP)[:, None]
    keys = ()
    values = ()
    # Tuples grow: Triton knows no starred ones, mypy none that grow.
    for step in tl.static_range(OWN):
        if step < OWN - 1:
            earlier = tl.load(ancestors + row * (OWN - 1) + step)
            at = (step * step_rows + earlier) * (HEADS // GROUP * DIM) + kv_head * DIM + lane
            k = tl.load(suffix_keys + at, mask=real[:, None], other=0.0)
            v = tl.load(suffix_values + at, mask=real[:, None], other=0.0)
        else:
            if ROTATE:
                k = rotated(key, row * k_row + head // GROUP * k_head, real, k_weight, cos, sin, eps, DIM)
            else:
                k = tl.load(key + row * k_row + kv_head * k_head + lane, mask=real[:, None], other=0.0)
            v = tl.load(value + row * v_row + kv_head * v_head + lane, mask=real[:, None], other=0.0)
        keys = keys + (k,)  # type: ignore[assignment]  # noqa: RUF005
        values = values + (v,)  # type: ignore[assignment]  # noqa: RUF005
    return keys, values


@triton.jit
def _attend_path(
    q, keys, values, top, total, acc, scale, soft_cap, window,
    OWN: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """A beam's own tokens, OWN keys and values [M, D], into the running softmax of some of its heads. q [M, D]."""
    for step in tl.static_range(OWN):
        top, total, acc = attend_own(
            q, keys[step], values[step], top, total, acc, scale, soft_cap, OWN - 1 - step, window, CAPPED, WINDOWED
        )
    return top, total, acc


@triton.jit
def _store_row(values, quantized, scales, row, at, real, dtype: tl.constexpr):
    """One row's values [heads, D], rounded to `dtype`, as e4m3 at `quantized` + `at`, and their scale."""
    rounded = tl.where(real[:, None], values.to(dtype).to(tl.float32), 0.0)
    own = scale_of(tl.max(tl.max(tl.abs(rounded), 1), 0))
    tl.store(scales + row, own)
    tl.store(quantized + at, to_e4m3(rounded * (1.0 / own)), mask=real[:, None])


@triton.jit
def _parts(
    part, first, num_rows, begin: tl.constexpr, bound, head, real,
    HEADS: tl.constexpr, DIM: tl.constexpr, NUM: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The results of NUM spans from `begin` on, of which those below `bound` are read: NUM tiles [heads, DIM], or one tile
    [NUM, heads, DIM]. Tiles of all heads stand APART: together, several spans would lie in several warps, which had to exchange
    their sums."""
    lane = tl.arange(0, DIM)
    if APART:
        parts = ()
        for one in tl.static_range(NUM):
            place = (first + (begin + one) * num_rows) * HEADS + head
            there = real & (head * 0 + (begin + one) < bound)
            parts = parts + (tl.load(part + place[:, None] * DIM + lane, mask=there[:, None], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        some = begin + tl.arange(0, NUM)[:, None]
        place = (first + some * num_rows) * HEADS + head[None, :]
        there = (some < bound) & real[None, :]
        parts = tl.load(part + place[:, :, None] * DIM + lane[None, None, :], mask=there[:, :, None], other=0.0)
    return parts


@triton.jit
def _add_parts(
    acc, parts, part_top, first, num_rows, begin: tl.constexpr, num_spans, head, real, base,
    HEADS: tl.constexpr, NUM: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """`_parts` of spans weighed by their softmax's sums, 2 ** (part_top − base), into acc [heads, DIM]. What lies behind the
    spans that there are may be anything."""
    if APART:
        for one in tl.static_range(NUM):
            place = (first + (begin + one) * num_rows) * HEADS + head
            there = real & (head * 0 + (begin + one) < num_spans)
            grow = tl.exp2(tl.load(part_top + place, mask=there, other=NEVER) - base)
            acc += tl.where(there[:, None], parts[one].to(tl.float32) * grow[:, None], 0.0)
    else:
        some = begin + tl.arange(0, NUM)[:, None]
        place = (first + some * num_rows) * HEADS + head[None, :]
        there = (some < num_spans) & real[None, :]
        grow = tl.exp2(tl.load(part_top + place, mask=there, other=NEVER) - base[None, :])
        acc += tl.sum(tl.where(there[:, :, None], parts.to(tl.float32) * grow[:, :, None], 0.0), 0)
    return acc


@triton.jit(do_not_specialize=["step_rows", "width", "max_spans"])
def merge_kernel(
    query, key, value, part, part_top, requests, owner, suffix_keys, suffix_values, ancestors,
    q_weight, k_weight, cos, sin, result, quantized, scales,
    width, max_spans, step_rows, k_row, k_head, v_row, v_head, window, eps, scale, soft_cap, q_row, q_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
    OWN: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, QUANTIZED: tl.constexpr,
    ROTATE: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs (query row, BLOCK heads): the results of at most MOST spans of its prompt, and OWN tokens of a beam, merged. Own
    tokens: as of `_own_tokens`, each request having `width` rows. OWN 0: the row is no beam; if its prompt was not cut, it has
    its result already. part, part_top: as of `prompt_kernel`, of at most max_spans spans. QUANTIZED: all rows go to `quantized`
    e4m3 [rows, heads · D] and `scales` [rows]; BLOCK has all heads then. ROTATE: queries and new keys are as they leave the
    product; with KEEP new keys and values are left in the suffix, as those of this step.

    A program does little, so what it costs is trips to memory one after another: all that depends on nothing is loaded first.
    A beam's spans lie where their numbers say, so the first ones are loaded before it is known how many there are.
    """
    wait_for_earlier(EARLY)
    AT_ONCE: tl.constexpr = 8 if MOST > 8 else MOST
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = head < HEADS
    lane = tl.arange(0, DIM)
    to = row * (HEADS * DIM) + head[:, None] * DIM + lane
    if OWN > 0:
        request = tl.program_id(0) // width
        num_spans = tl.load(requests + request * REQUEST_SIZE + SPANS)
        first, num_rows = row, tl.num_programs(0).to(tl.int64)
        known = max_spans
        cos += row * (DIM // 2)
        sin += row * (DIM // 2)
        if ROTATE:
            q = rotated(query, row * q_row + head * q_head, real, q_weight, cos, sin, eps, DIM)
        else:
            q = tl.load(query + row * q_row + head[:, None] * q_head + lane, mask=real[:, None], other=0.0)
        keys, values = _own_tokens(
            row, head, real, key, value, suffix_keys, suffix_values, ancestors, k_weight, cos, sin,
            step_rows, k_row, k_head, v_row, v_head, eps, HEADS, GROUP, DIM, OWN, ROTATE,
        )  # fmt: skip
    else:
        request = tl.load(owner + row)
        if QUANTIZED:
            if request < 0:
                whole = tl.load(result + to, mask=real[:, None], other=0.0).to(tl.float32)
                _store_row(whole, quantized, scales, row, to, real, result.dtype.element_ty)
                return
        elif request < 0:
            return
        at = requests + request * REQUEST_SIZE
        num_spans = tl.load(at + SPANS)
        if num_spans <= 1:  # there are no parts of it
            if QUANTIZED:
                whole = tl.load(result + to, mask=real[:, None], other=0.0).to(tl.float32)
                _store_row(whole, quantized, scales, row, to, real, result.dtype.element_ty)
            return
        first = tl.load(at + FIRST_PART) + row - tl.load(at + PART_ROW)
        num_rows = tl.load(at + PART_ROWS).to(tl.int64)
        known = num_spans
    span = tl.arange(0, MOST)[:, None]
    of_span = (first + span * num_rows) * HEADS + head[None, :]
    tops = tl.load(part_top + of_span, mask=(span < known) & real[None, :], other=NEVER)
    parts = _parts(part, first, num_rows, 0, known, head, real, HEADS, DIM, AT_ONCE, QUANTIZED)
    if MOST > AT_ONCE:
        later = _parts(part, first, num_rows, AT_ONCE, num_spans, head, real, HEADS, DIM, MOST - AT_ONCE, QUANTIZED)
    tops = tl.where(span < num_spans, tops, NEVER)
    top = tl.max(tops, 0)
    base = tl.where(top == NEVER, 0.0, top)
    total = tl.sum(tl.exp2(tops - base[None, :]), 0)
    acc = tl.zeros([BLOCK, DIM], tl.float32)
    acc = _add_parts(acc, parts, part_top, first, num_rows, 0, num_spans, head, real, base, HEADS, AT_ONCE, QUANTIZED)
    if MOST > AT_ONCE:
        acc = _add_parts(
            acc, later, part_top, first, num_rows, AT_ONCE, num_spans, head, real, base, HEADS, MOST - AT_ONCE, QUANTIZED
        )  # fmt: skip
    if OWN > 0:
        top, total, acc = _attend_path(q, keys, values, top, total, acc, scale, soft_cap, window, OWN, CAPPED, WINDOWED)
    total = tl.where(real, total, 1.0)
    merged = acc * (1.0 / total)[:, None]
    let_next_begin(EARLY)
    if KEEP:  # each head of a group has its key and value, and the first one's are kept
        place = (((OWN - 1) * step_rows + row) * (HEADS // GROUP) + head // GROUP)[:, None] * DIM + lane
        kept = (real & (head % GROUP == 0))[:, None]
        tl.store(suffix_keys + place, keys[OWN - 1], mask=kept)
        tl.store(suffix_values + place, values[OWN - 1], mask=kept)
    if QUANTIZED:
        _store_row(merged, quantized, scales, row, to, real, result.dtype.element_ty)
    else:
        tl.store(result + to, merged.to(result.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["step_rows"])
def join_own_kernel(
    query, key, value, prompt_top, suffix_keys, suffix_values, ancestors, result, quantized, scales,
    step_rows, k_row, k_head, v_row, v_head, scale, soft_cap, q_row, q_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr,
    CAPPED: tl.constexpr, QUANTIZED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs (query row, BLOCK heads): OWN tokens of a beam joined to its prompt's result, in place, or with QUANTIZED as in
    `merge_kernel`. Own tokens: as of `_own_tokens`.

    prompt_top: fp32 [rows, heads], the logarithm of the prompt's softmax sum in base 2: its result is what one key of that
    score, with the result for its value, would give.
    """
    wait_for_earlier(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = head < HEADS
    lane = tl.arange(0, DIM)
    to = (row * HEADS + head[:, None]) * DIM + lane
    q = tl.load(query + row * q_row + head[:, None] * q_head + lane, mask=real[:, None], other=0.0)
    keys, values = _own_tokens(
        row, head, real, key, value, suffix_keys, suffix_values, ancestors, key, key, key,
        step_rows, k_row, k_head, v_row, v_head, 0.0, HEADS, GROUP, DIM, OWN, False,
    )  # fmt: skip
    acc = tl.load(result + to, mask=real[:, None], other=0.0).to(tl.float32)
    top = tl.load(prompt_top + row * HEADS + head, mask=real, other=0.0)
    total = tl.full([BLOCK], 1.0, tl.float32)
    top, total, acc = _attend_path(q, keys, values, top, total, acc, scale, soft_cap, 0, OWN, CAPPED, False)
    joined = acc * (1.0 / total)[:, None]
    let_next_begin(EARLY)
    if QUANTIZED:
        _store_row(joined, quantized, scales, row, to, real, result.dtype.element_ty)
    else:
        tl.store(result + to, joined.to(result.dtype.element_ty), mask=real[:, None])
