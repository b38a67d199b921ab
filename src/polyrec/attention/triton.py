"""Attention through our own Triton kernels: packed prefill, and a search whose beams read one copy of their prompt.

Nothing here is synchronised and no shape depends on a tensor's value, so a search can be captured.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..hardware.base.attention import (
    AttentionBackend,
    AttentionNeeds,
    AttentionPlan,
    AttentionSupport,
    KeyValueCache,
    PackedLayout,
    SearchAttention,
    WriteTarget,
)
from ..hardware.ops import PlatformOps
from . import triton_kernels as kernels
from .sdpa import SdpaAttention

MAX_SPANS = 16
QUERY_ROWS = 512  # query rows of a request and kv head from which its prompt is not cut: there are programs enough


class TritonAttention(AttentionBackend):
    """Head sizes that are powers of two, windows and soft caps; no gradients. Branches, which training packs, go to torch's."""

    support = AttentionSupport(
        head_dims=(16, 32, 64, 128, 256), platforms=("nvidia", "metax", "rocm"), sliding_window=True, soft_cap=True
    )
    capturable = True

    def packed(self, layout: PackedLayout, cache: KeyValueCache | None = None) -> AttentionPlan:
        if layout.branch is not None:
            return SdpaAttention(self.needs, self.ops).packed(layout, cache)
        return PackedPlan(self.needs, self.ops, layout, cache)

    def search(self, layout: PackedLayout, cache: KeyValueCache, *, width: int, num_kept: int) -> SearchAttention:
        return TritonSearch(self.needs, self.ops, layout, cache, width, num_kept)


class PackedPlan(AttentionPlan):
    """Each sequence attends to itself. With a cache, keys and values are kept in slots 0…T − 1 for the search."""

    def __init__(
        self, needs: AttentionNeeds, ops: PlatformOps, layout: PackedLayout, cache: KeyValueCache | None
    ) -> None:
        self._needs = needs
        self._write = ops.kv.write
        self._cache = cache
        self._lengths = layout.lengths
        self._starts = layout.starts
        self._longest = layout.longest
        self._slots = torch.arange(layout.num_tokens, device=layout.lengths.device) if cache is not None else None

    def target(self, layer: int) -> WriteTarget | None:
        if self._cache is None or self._slots is None:
            return None
        return WriteTarget(*self._cache.layer(layer), self._slots)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        target = self.target(layer)
        if target is not None:
            self._write(key, value, *target)
        return self.run_written(layer, query, key, value)

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        needs, (tokens, heads, dim) = self._needs, query.shape
        result = torch.empty((tokens, heads * dim), dtype=query.dtype, device=query.device)
        rows, keys = (64, 64) if dim > 128 else (128, 64)
        grid = (triton.cdiv(self._longest, rows), heads, len(self._lengths))
        kernels.packed_kernel[grid](
            query, key, value, result, self._starts, self._lengths, dim**-0.5, needs.soft_cap or 1.0,
            needs.sliding_window or 0, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
            HEADS=heads, GROUP=heads // needs.num_kv_heads, DIM=dim, ROWS=rows, KEYS=keys,
            CAPPED=needs.soft_cap is not None, WINDOWED=needs.sliding_window is not None,
            num_warps=8, num_stages=3 if query.element_size() == 2 else 1,
        )  # fmt: skip
        return result


class TritonSearch(SearchAttention):
    """Where the prompts of one batch lie, and what its beams add: [layers, passes, R · W rows, kv heads, D].

    spans: int32 [R], tokens of one span of a request's prompt, from its own length and width alone.
    """

    def __init__(
        self,
        needs: AttentionNeeds,
        ops: PlatformOps,
        layout: PackedLayout,
        cache: KeyValueCache,
        width: int,
        num_kept: int,
    ) -> None:
        self.needs = needs
        self.write = ops.kv.write
        self.cache = cache
        self.width = width
        self.lengths = layout.lengths
        self.starts = layout.starts
        self.num_rows = len(layout.lengths) * width
        self.max_spans, self.spans = spans_of(layout, width * needs.num_heads // needs.num_kv_heads)
        kept = (needs.num_layers, num_kept, self.num_rows, needs.num_kv_heads, needs.head_dim)
        device = layout.lengths.device
        self.suffix_keys = torch.empty(kept, dtype=needs.dtype, device=device)
        self.suffix_values = torch.empty_like(self.suffix_keys)
        self.rows = torch.arange(self.num_rows, device=device)
        part = (self.max_spans, self.num_rows, needs.num_heads)
        # One for all layers: they run one after another.
        self.part = torch.empty((*part, needs.head_dim), dtype=torch.float32, device=device)
        self.part_top = torch.empty(part, dtype=torch.float32, device=device)
        self.part_total = torch.empty_like(self.part_top)

    def step(self, ancestors: Tensor, *, last: bool) -> AttentionPlan:
        return BeamPlan(self, ancestors, last=last)


class BeamPlan(AttentionPlan):
    """One pass over R · W beams."""

    def __init__(self, search: TritonSearch, ancestors: Tensor, *, last: bool) -> None:
        self._search = search
        self._ancestors = ancestors.contiguous()
        self._last = last

    def target(self, layer: int) -> WriteTarget | None:
        if self._last:
            return None
        search, (rows, step) = self._search, self._ancestors.shape
        return WriteTarget(search.suffix_keys[layer, step], search.suffix_values[layer, step], search.rows[:rows])

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        target = self.target(layer)
        if target is not None:
            self._search.write(key, value, *target)
        return self.run_written(layer, query, key, value)

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        search, needs = self._search, self._search.needs
        rows, heads, dim = query.shape
        width, group = rows // len(search.lengths), heads // needs.num_kv_heads
        num_earlier = self._ancestors.shape[1]
        result = torch.empty((rows, heads * dim), dtype=query.dtype, device=query.device)
        common = (width, needs.sliding_window or 0, dim**-0.5, needs.soft_cap or 1.0, *query.stride()[:2])
        sizes = {"HEADS": heads, "GROUP": group, "DIM": dim}
        flags = {"CAPPED": needs.soft_cap is not None, "WINDOWED": needs.sliding_window is not None}
        block_rows = 16 if width * group <= 16 else 64
        grid = (len(search.lengths) * needs.num_kv_heads, triton.cdiv(width * group, block_rows), search.max_spans)
        kernels.prompt_kernel[grid](
            query, *search.cache.layer(layer), search.starts, search.lengths, search.spans,
            search.part, search.part_top, search.part_total, *common, num_earlier + 1, search.num_rows,
            **sizes, ROWS=block_rows, KEYS=64, **flags, num_warps=4, num_stages=3 if query.element_size() == 2 else 2,
        )  # fmt: skip
        kernels.merge_kernel[(rows,)](
            query, key, value, search.part, search.part_top, search.part_total, search.lengths, search.spans,
            search.suffix_keys[layer], search.suffix_values[layer], self._ancestors, result,
            *common, *key.stride()[:2], *value.stride()[:2], search.num_rows,
            **sizes, BLOCK=triton.next_power_of_2(heads), EARLIER=num_earlier, **flags, num_warps=4,
        )  # fmt: skip
        return result


def spans_of(layout: PackedLayout, query_rows: int) -> tuple[int, Tensor]:
    """-> (most spans that any prompt of this layout may have, int32 [R] tokens of a request's span, from its own length).

    Few query rows leave most of the device idle unless their prompt is cut; many fill it, and each span would only add
    traffic for its partial results.
    """
    if query_rows >= QUERY_ROWS:
        return 1, layout.lengths.clamp_min(1).int()
    size = 256 if query_rows <= 128 else 512 if query_rows <= 256 else 1024
    spans = ((layout.lengths + (MAX_SPANS - 1)) // MAX_SPANS).clamp_min(size).int()
    return max(1, min(MAX_SPANS, -(-layout.longest // size))), spans
