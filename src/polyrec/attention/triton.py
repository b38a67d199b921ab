"""Attention through our own Triton kernels: packed prefill, the rest of prompts of which a beginning is cached, and a search
whose beams read one copy of their prompt.

Nothing here is synchronised and no shape depends on a tensor's value, so all of it can be captured.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..hardware.backends.cuda_like.kernels.early import early
from ..hardware.base.attention import (
    AttentionBackend,
    AttentionNeeds,
    AttentionPlan,
    AttentionSupport,
    HeadRotation,
    KeyValueCache,
    PackedLayout,
    SearchAttention,
    WriteTarget,
)
from ..hardware.ops import PlatformOps
from ..hardware.ops.linear import QuantizedRows
from . import triton_kernels as kernels
from .sdpa import SdpaAttention
from .triton_prompt import KEYS, BeamReader, OwnTokens, PromptReader, room_for_quantized
from .triton_work import Work, list_work

PROGRAMS = 264  # two on each multiprocessor of an H200


class TritonAttention(AttentionBackend):
    """Head sizes that are powers of two, windows, soft caps, cached prefixes; no gradients.

    Branches, which training packs, go to torch's.
    """

    support = AttentionSupport(
        head_dims=(16, 32, 64, 128, 256),
        platforms=("nvidia", "metax", "rocm"),
        sliding_window=True,
        soft_cap=True,
        prefix=True,
    )
    capturable = True

    def packed(self, layout: PackedLayout, cache: KeyValueCache | None = None) -> AttentionPlan:
        if layout.branch is not None:
            return SdpaAttention(self.needs, self.ops).packed(layout, cache)
        return PackedPlan(self.needs, self.ops, layout, cache)

    def search(self, layout: PackedLayout, cache: KeyValueCache, *, width: int, num_kept: int) -> SearchAttention:
        return TritonSearch(self.needs, self.ops, layout, cache, width, num_kept)


class PackedPlan(AttentionPlan):
    """Each sequence attends to itself, and to what the cache holds of its prompt. A cache keeps keys and values."""

    def __init__(
        self, needs: AttentionNeeds, ops: PlatformOps, layout: PackedLayout, cache: KeyValueCache | None
    ) -> None:
        assert cache is not None or layout.cached is None, "cached tokens without a cache"
        self._needs = needs
        self._write = ops.kv.write
        self._cache = cache
        self._layout = layout
        self._slots = layout.slots if cache is not None else None

    def target(self, layer: int) -> WriteTarget | None:
        if self._cache is None or self._slots is None:
            return None
        return WriteTarget(*self._cache.layer(layer), self._slots)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | QuantizedRows:
        target = self.target(layer)
        if target is not None:
            self._write(key, value, *target)
        return self.run_written(layer, query, key, value)

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | QuantizedRows:
        tokens, heads, dim = query.shape
        result = torch.empty((tokens, heads * dim), dtype=query.dtype, device=query.device)
        if self._work is not None:
            self._attend_packed(self._work, query, key, value, result)
        if self._reader is None:
            return result
        into = room_for_quantized(query) if self._reader.quantizes else None
        self._reader.attend(layer, query, result, into=into)
        return result if into is None else into

    def _attend_packed(self, work: Work, query: Tensor, key: Tensor, value: Tensor, result: Tensor) -> None:
        needs, (_, heads, dim) = self._needs, query.shape
        tile = self._packed_tile
        kernels.packed_kernel[(heads, work.max_items)](
            query, key, value, result, work.items, work.count, dim**-0.5, needs.soft_cap or 1.0,
            needs.sliding_window or 0, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
            HEADS=heads, GROUP=heads // needs.num_kv_heads, DIM=dim, ROWS=tile.rows, KEYS=KEYS,
            CAPPED=needs.soft_cap is not None, WINDOWED=needs.sliding_window is not None,
            num_warps=tile.warps, num_stages=tile.stages if query.element_size() == 2 else 1, **early(),
        )  # fmt: skip

    # Both are made in the first layer: another plan of this kind may need neither.
    @cached_property
    def _work(self) -> Work | None:
        """Of sequences that read the packed keys and values: those of which nothing is cached.

        They get here what they get in a batch that reads no cache, bit for bit; one that only the device knows costs a launch.
        """
        layout = self._layout
        if self._reader is not None and layout.table is not None and layout.table.all_begun:
            return None
        return list_work(
            layout.lengths,
            layout.num_tokens,
            tile=self._packed_tile.rows,
            cached=layout.cached,
        )

    @property
    def _packed_tile(self) -> PackedTile:
        return packed_tile(self._layout.num_tokens, self._needs.num_heads, self._needs.head_dim)

    @cached_property
    def _reader(self) -> PromptReader | None:
        if self._cache is None or self._layout.cached is None:
            return None
        return PromptReader(self._needs, self._layout, self._cache)


class PackedTile(NamedTuple):
    """Queries of one program of the packed kernel, its warps and stages."""

    rows: int
    warps: int
    stages: int


def packed_tile(num_tokens: int, heads: int, head_dim: int) -> PackedTile:
    """For prefills of so many tokens. Where tiles of one warpgroup all run at once, two on each multiprocessor, they finish
    sooner than larger ones: on an H200 in 8.2 us instead of 10.6 for 305 tokens, 14.3 instead of 16.8 for 610, and 21.4 instead
    of 22.9 for 1,001. Rows add up alike in both."""
    if head_dim > 128:
        return PackedTile(64, 8, 3)
    if num_tokens * heads <= 64 * PROGRAMS:
        return PackedTile(64, 4, 2)
    return PackedTile(128, 8, 3)


class TritonSearch(SearchAttention):
    """How the prompts of one batch are read, and what its beams add: [layers, passes, R · W rows, kv heads, D].

    reader: of passes over all `width` beams, if not our own.
    """

    def __init__(
        self,
        needs: AttentionNeeds,
        ops: PlatformOps,
        layout: PackedLayout,
        cache: KeyValueCache,
        width: int,
        num_kept: int,
        reader: BeamReader | None = None,
    ) -> None:
        self.write = ops.kv.write
        self.num_requests = len(layout.lengths)
        self._make_reader = partial(PromptReader, needs, layout, cache)
        self._readers: dict[int, BeamReader] = {} if reader is None else {width: reader}
        num_rows, device = len(layout.lengths) * width, layout.lengths.device
        kept = (needs.num_layers, num_kept, num_rows, needs.num_kv_heads, needs.head_dim)
        self.suffix_keys = torch.empty(kept, dtype=needs.dtype, device=device)
        self.suffix_values = torch.empty_like(self.suffix_keys)
        self._num_rows, self._device = num_rows, device

    @cached_property
    def rows(self) -> Tensor:
        """int64 [R · W], where whoever rotates writes; a plan that rotates itself needs none."""
        return torch.arange(self._num_rows, device=self._device)

    def step(self, ancestors: Tensor, *, last: bool) -> AttentionPlan:
        width = len(ancestors) // self.num_requests  # the first levels of a small catalog hold fewer beams
        if width not in self._readers:
            self._readers[width] = self._make_reader(width=width)
        return BeamPlan(self, self._readers[width], ancestors, last=last)


class BeamPlan(AttentionPlan):
    """One pass over R · W beams."""

    def __init__(self, search: TritonSearch, reader: BeamReader, ancestors: Tensor, *, last: bool) -> None:
        self._search = search
        self._reader = reader
        self._ancestors = ancestors.contiguous()
        self._last = last

    def target(self, layer: int) -> WriteTarget | None:
        if self._last:
            return None
        search, (rows, step) = self._search, self._ancestors.shape
        return WriteTarget(search.suffix_keys[layer, step], search.suffix_values[layer, step], search.rows[:rows])

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | QuantizedRows:
        target = self.target(layer)
        if target is not None:
            self._search.write(key, value, *target)
        return self.run_written(layer, query, key, value)

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | QuantizedRows:
        return self._run(layer, query, key, value, None)

    @property
    def rotates(self) -> bool:
        return self._reader.rotates

    def run_product(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: HeadRotation
    ) -> Tensor | QuantizedRows:
        return self._run(layer, query, key, value, rotation)

    def _run(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: HeadRotation | None
    ) -> Tensor | QuantizedRows:
        search, (rows, heads, dim) = self._search, query.shape
        result = torch.empty((rows, heads * dim), dtype=query.dtype, device=query.device)
        own = OwnTokens(key, value, search.suffix_keys[layer], search.suffix_values[layer], self._ancestors, rotation)
        into = room_for_quantized(query) if self._reader.quantizes else None
        self._reader.attend(layer, query, result, own, into)
        return result if into is None else into
