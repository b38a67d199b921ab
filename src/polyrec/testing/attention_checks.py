"""What every attention backend must do, as functions that raise AssertionError; `testing.conformance` runs them under pytest.

Each compares with `testing.brute_force`. Inputs are views of one matrix, as a fused projection gives them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..attention.layout import packed_layout
from ..hardware.base.attention import AttentionBackend, AttentionNeeds, AttentionSupport, PackedLayout
from ..hardware.base.backend import HardwareBackend
from ..hardware.ops import PlatformOps
from ..hardware.ops.draw import Draw
from ..hardware.ops.spec import FLOATS
from .attention_runs import BeamWalk, Prefill, WatchedCache, attend, draw_fused, expect_near, plain, split
from .brute_force import packed_attention
from .prompts import Prompts, in_pages

Build = Callable[[AttentionNeeds, PlatformOps], AttentionBackend]
HEADS = ((4, 4), (4, 2), (6, 1))
LENGTHS = (6, 1, 9, 70)
BRANCH = (0, 0, 0, 1, 1, 2) + (0,) + (0, 0, 1, 1, 1, 2, 2, 3, 3) + (0,) * 40 + (1,) * 15 + (2,) * 15
WINDOWS = (1, 2, 4, 100)
SOFT_CAP = 1.5
SOME_HEAD_DIMS = (8, 20, 64, 80, 96, 128, 256)
BATCHES = ((5, 1, 9), (2, 3))
WIDTHS = (2, 3, 3, 4)  # beams of a request in each pass
# Tokens of each of LENGTHS, and of each of BATCHES, that a cache holds beforehand: whole pages, parts of pages, none, all but
# the last token.
CACHED = ((4, 0, 7, 64), (5, 0, 1, 3))
BATCHES_CACHED = ((4, 0, 8), (0, 1))


def needs_for(
    support: AttentionSupport,
    dtype: torch.dtype,
    heads: tuple[int, int] = (4, 2),
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    train: bool = False,
    head_dim: int | None = None,
) -> AttentionNeeds:
    """A small model's needs. head_dim None: the smallest that the backend supports."""
    head_dim = head_dim or (min(support.head_dims) if support.head_dims else 16)
    return AttentionNeeds(
        2, *heads, head_dim, dtype=dtype, sliding_window=window, soft_cap=soft_cap, train=train
    )  # fmt: skip


def claimed_head_dims(support: AttentionSupport) -> tuple[int, ...]:
    """All that the backend names; of those that claim any, sizes that models have, and one that is no multiple of 16."""
    return SOME_HEAD_DIMS if support.head_dims is None else tuple(sorted(set(support.head_dims)))


def claimed_dtypes(support: AttentionSupport, hardware: HardwareBackend) -> tuple[torch.dtype, ...]:
    """The dtypes that backend and platform both claim."""
    claimed = FLOATS if support.dtypes is None else support.dtypes
    return tuple(dtype for dtype in claimed if dtype in hardware.capabilities.dtypes)


def check_packed(build: Build, hardware: HardwareBackend, needs: AttentionNeeds, *, branched: bool = False) -> None:
    """Sequences of ragged lengths see themselves alone, causally; a branch sees its prompt and itself."""
    draw = Draw(needs.dtype, seed=1)
    branch = BRANCH if branched else None
    plan = build(needs, hardware.ops).packed(_layout(LENGTHS, branch, hardware))
    for layer in range(needs.num_layers):
        fused = draw_fused(draw, sum(LENGTHS), needs)
        with torch.no_grad():
            found = attend(plan, layer, split(hardware.runtime.to_device(fused), needs), hardware.ops)
        expected = packed_attention(*split(fused.double(), needs), LENGTHS, branch, needs)
        expect_near(found, expected, hardware, needs, f"packed attention of layer {layer}")


def check_gradients(build: Build, hardware: HardwareBackend, needs: AttentionNeeds, *, branched: bool = False) -> None:
    """Gradients of queries, keys and values."""
    draw = Draw(needs.dtype, seed=2)
    branch = BRANCH if branched else None
    plan = build(needs, hardware.ops).packed(_layout(LENGTHS, branch, hardware))
    fused = draw_fused(draw, sum(LENGTHS), needs)
    weight = draw.normal(sum(LENGTHS), needs.num_heads * needs.head_dim)
    ours = hardware.runtime.to_device(fused.clone()).requires_grad_()
    (plain(plan.run(0, *split(ours, needs))) * hardware.runtime.to_device(weight)).sum().backward()
    wide = fused.double().requires_grad_()
    (packed_attention(*split(wide, needs), LENGTHS, branch, needs) * weight.double()).sum().backward()
    assert ours.grad is not None, "no gradient reached the inputs"
    assert wide.grad is not None
    expect_near(ours.grad, wide.grad, hardware, needs, "the gradient of queries, keys and values", slack=4)


def check_cache(build: Build, hardware: HardwareBackend, needs: AttentionNeeds) -> None:
    """A prefill writes each layer's keys and values once into slots 0…T−1 of that layer, and nothing else."""
    _check_stored(build, hardware, needs, [Prompts(LENGTHS)])


def check_page_writes(build: Build, hardware: HardwareBackend, needs: AttentionNeeds) -> None:
    """The same where a table names the pages of each prompt."""
    _check_stored(build, hardware, needs, [in_pages(LENGTHS, Draw(needs.dtype, seed=4))])


def check_prefix(build: Build, hardware: HardwareBackend, needs: AttentionNeeds) -> None:
    """Where a cache holds the beginnings of prompts, their last tokens get what they would get in whole prompts, and their keys
    and values are written once behind the beginnings, which stay as they are."""
    draw = Draw(needs.dtype, seed=5)
    _check_stored(build, hardware, needs, [in_pages(LENGTHS, draw, cached) for cached in CACHED])


def check_beams(build: Build, hardware: HardwareBackend, needs: AttentionNeeds, widths: Sequence[int] = WIDTHS) -> None:
    """Passes over beams that change parents, for prompts of mixed lengths, in one batch after another on the same backend."""
    _check_search(build, hardware, needs, [Prompts(lengths) for lengths in BATCHES], widths)


def check_page_beams(build: Build, hardware: HardwareBackend, needs: AttentionNeeds) -> None:
    """The same over prompts in pages. The second batch's are in pages that the first one's used."""
    draw = Draw(needs.dtype, seed=6)
    _check_search(build, hardware, needs, [in_pages(lengths, draw) for lengths in BATCHES])


def check_prefix_beams(build: Build, hardware: HardwareBackend, needs: AttentionNeeds) -> None:
    """The same after prefills that go on from cached beginnings."""
    draw = Draw(needs.dtype, seed=7)
    batches = [in_pages(*batch) for batch in zip(BATCHES, (draw, draw), BATCHES_CACHED, strict=True)]
    _check_search(build, hardware, needs, batches)


def _check_stored(build: Build, hardware: HardwareBackend, needs: AttentionNeeds, batches: Sequence[Prompts]) -> None:
    """Prefills: their output, what they write, and how often."""
    draw = Draw(needs.dtype, seed=3)
    ops, calls = _counting_writes(hardware.ops)
    attention = build(needs, ops)
    for prompts in batches:
        cache = WatchedCache(needs, prompts.num_slots(), hardware, paged=prompts.pages is not None)
        prefill = Prefill(attention, needs, hardware, cache, prompts, draw)
        all_slots = [slot for slots in prompts.slots() for slot in slots]
        for layer in range(needs.num_layers):
            fused = prefill.begin(layer)
            expected = cache.copies()
            for part, rows in zip(expected, split(fused, needs)[1:], strict=True):
                part[layer, all_slots] = rows
            before, calls[:] = cache.versions(), []
            prefill.run(layer, fused, ops)
            for name, found, part in zip(("keys", "values"), cache.copies(), expected, strict=True):
                same = torch.equal(found.nan_to_num(), part.nan_to_num()) and torch.equal(found.isnan(), part.isnan())
                assert same, (
                    f"layer {layer}: the cache's {name} are not the layer's own in the prompts' slots, or changed elsewhere"
                )
            times = [after - earlier for after, earlier in zip(cache.versions(), before, strict=True)]
            assert max(*times, len(calls)) <= 1, f"layer {layer}: keys and values were written {times} times, not once"
            written = cache.versions()
            prefill.run_last(layer, fused)
            assert cache.versions() == written, f"layer {layer}: a plan of last rows wrote, though all was there"


def _check_search(
    build: Build,
    hardware: HardwareBackend,
    needs: AttentionNeeds,
    batches: Sequence[Prompts],
    widths: Sequence[int] = WIDTHS,
) -> None:
    attention = build(needs, hardware.ops)
    num_slots = max(prompts.num_slots() for prompts in batches)
    cache = WatchedCache(needs, num_slots, hardware, paged=batches[0].pages is not None)
    for number, prompts in enumerate(batches):
        BeamWalk(attention, needs, hardware, cache, prompts, widths, seed=10 + number).run()


def _layout(lengths: Sequence[int], branch: Sequence[int] | None, hardware: HardwareBackend) -> PackedLayout:
    of_token = None if branch is None else torch.tensor(branch)
    return packed_layout(torch.tensor(lengths), of_token, hardware.runtime.to_device)


def _counting_writes(ops: PlatformOps) -> tuple[PlatformOps, list[None]]:
    """The ops with a kv.write that notes each call."""
    calls: list[None] = []

    def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        calls.append(None)
        ops.kv.write(key, value, key_cache, value_cache, slots)

    return dataclasses.replace(ops, kv=dataclasses.replace(ops.kv, write=write)), calls
