"""Triton kernels that finish attention: parts of a prompt's result merged, and beams' own tokens joined to it; rows may leave
quantised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..hardware.backends.cuda_like.kernels.e4m3 import scale_of, to_e4m3
from .triton_kernels import NEVER, attend_own
from .triton_work import FIRST_PART, PART_ROW, PART_ROWS, REQUEST_SIZE, SPANS


@triton.jit
def _own_tokens(
    row, head, real, key, value, suffix_keys, suffix_values, ancestors, step_rows, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Keys and values [M, D] of the OWN tokens of one beam for some of its heads, of which `real` ones are there, oldest first.

    Earlier tokens are found through ancestors int64 [rows, OWN − 1] in suffix_keys, suffix_values [steps, step_rows, kv heads,
    DIM]; the new one is the row's.
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


@triton.jit(do_not_specialize=["step_rows", "width"])
def merge_kernel(
    query, key, value, part, part_top, part_total, requests, owner, suffix_keys, suffix_values, ancestors, result,
    quantized, scales, width, step_rows, k_row, k_head, v_row, v_head, window, scale, soft_cap, q_row, q_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
    OWN: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Programs (query row, BLOCK heads): the results of at most MOST spans of its prompt, and OWN tokens of a beam, merged. A
    row whose prompt was not cut has its result already. Own tokens: as of `_own_tokens`; OWN 0: the row is no beam, else each
    request has `width` rows. QUANTIZED: all rows go to `quantized` e4m3 [rows, heads · D] and `scales` [rows]; BLOCK has all
    heads then.

    A program does little, so what it costs is trips to memory one after another: all that depends on nothing is loaded first.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = head < HEADS
    lane = tl.arange(0, DIM)
    tile = head[:, None] * DIM + lane
    if OWN > 0:
        q = tl.load(query + row * q_row + head[:, None] * q_head + lane, mask=real[:, None], other=0.0)
        keys, values = _own_tokens(
            row, head, real, key, value, suffix_keys, suffix_values, ancestors, step_rows, k_row, k_head, v_row, v_head,
            HEADS, GROUP, DIM, OWN,
        )  # fmt: skip
        request = tl.program_id(0) // width
    else:
        request = tl.load(owner + row)
        if QUANTIZED:
            if request < 0:
                whole = tl.load(result + row * (HEADS * DIM) + tile, mask=real[:, None], other=0.0).to(tl.float32)
                _store_row(whole, quantized, scales, row, row * (HEADS * DIM) + tile, real, result.dtype.element_ty)
                return
        elif request < 0:
            return
    at = requests + request * REQUEST_SIZE
    num_spans = tl.load(at + SPANS)
    first = tl.load(at + FIRST_PART) + row
    if OWN > 0:
        num_rows = width.to(tl.int64)
        first -= request * num_rows
    else:
        num_rows = tl.load(at + PART_ROWS).to(tl.int64)
        first -= tl.load(at + PART_ROW)
    to = row * (HEADS * DIM) + tile
    if num_spans <= 1:
        if QUANTIZED:
            whole = tl.load(result + to, mask=real[:, None], other=0.0).to(tl.float32)
            _store_row(whole, quantized, scales, row, to, real, result.dtype.element_ty)
        return
    # Tops first, then many spans at a time.
    AT_ONCE: tl.constexpr = 8
    span = tl.arange(0, MOST)[:, None]
    of_span = (first + span * num_rows) * HEADS + head[None, :]
    there = (span < num_spans) & real[None, :]
    top = tl.max(tl.load(part_top + of_span, mask=there, other=NEVER), 0)
    base = tl.where(top == NEVER, 0.0, top)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DIM], tl.float32)
    if QUANTIZED:  # of a tile of all heads, several spans would lie in several warps, which had to exchange their sums
        for start in range(0, num_spans, AT_ONCE):
            tiles = ()
            for one in tl.static_range(AT_ONCE):
                place = (first + (start + one) * num_rows) * HEADS + head
                real_one = (head * 0 + (start + one) < num_spans) & real
                sums = tl.load(part + place[:, None] * DIM + lane, mask=real_one[:, None], other=0.0)
                tiles = tiles + (sums,)  # type: ignore[assignment]  # noqa: RUF005
            for one in tl.static_range(AT_ONCE):
                place = (first + (start + one) * num_rows) * HEADS + head
                real_one = (head * 0 + (start + one) < num_spans) & real
                grow = tl.exp2(tl.load(part_top + place, mask=real_one, other=NEVER) - base)
                total += tl.load(part_total + place, mask=real_one, other=0.0) * grow
                acc += tiles[one] * grow[:, None]
    else:
        for start in range(0, num_spans, AT_ONCE):
            some = start + tl.arange(0, AT_ONCE)[:, None]
            place = (first + some * num_rows) * HEADS + head[None, :]
            real_some = (some < num_spans) & real[None, :]
            grow = tl.exp2(tl.load(part_top + place, mask=real_some, other=NEVER) - base[None, :])
            total += tl.sum(tl.load(part_total + place, mask=real_some, other=0.0) * grow, 0)
            sums = tl.load(part + place[:, :, None] * DIM + lane[None, None, :], mask=real_some[:, :, None], other=0.0)
            acc += tl.sum(sums * grow[:, :, None], 0)
    if OWN > 0:
        top, total, acc = _attend_path(q, keys, values, top, total, acc, scale, soft_cap, window, OWN, CAPPED, WINDOWED)
    total = tl.where(real, total, 1.0)
    merged = acc / total[:, None]
    if QUANTIZED:
        _store_row(merged, quantized, scales, row, to, real, result.dtype.element_ty)
    else:
        tl.store(result + to, merged.to(result.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["step_rows"])
def join_own_kernel(
    query, key, value, prompt_top, suffix_keys, suffix_values, ancestors, result, quantized, scales,
    step_rows, k_row, k_head, v_row, v_head, scale, soft_cap, q_row, q_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr,
    CAPPED: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Programs (query row, BLOCK heads): OWN tokens of a beam joined to its prompt's result, in place, or with QUANTIZED as in
    `merge_kernel`. Own tokens: as of `_own_tokens`.

    prompt_top: fp32 [rows, heads], the logarithm of the prompt's softmax sum in base 2: its result is what one key of that
    score, with the result for its value, would give.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = head < HEADS
    lane = tl.arange(0, DIM)
    to = (row * HEADS + head[:, None]) * DIM + lane
    q = tl.load(query + row * q_row + head[:, None] * q_head + lane, mask=real[:, None], other=0.0)
    keys, values = _own_tokens(
        row, head, real, key, value, suffix_keys, suffix_values, ancestors, step_rows, k_row, k_head, v_row, v_head,
        HEADS, GROUP, DIM, OWN,
    )  # fmt: skip
    acc = tl.load(result + to, mask=real[:, None], other=0.0).to(tl.float32)
    top = tl.load(prompt_top + row * HEADS + head, mask=real, other=0.0)
    total = tl.full([BLOCK], 1.0, tl.float32)
    top, total, acc = _attend_path(q, keys, values, top, total, acc, scale, soft_cap, 0, OWN, CAPPED, False)
    joined = acc / total[:, None]
    if QUANTIZED:
        _store_row(joined, quantized, scales, row, to, real, result.dtype.element_ty)
    else:
        tl.store(result + to, joined.to(result.dtype.element_ty), mask=real[:, None])
