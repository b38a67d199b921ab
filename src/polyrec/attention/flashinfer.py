"""Prefill, and captured searches of many beams, through FlashInfer's kernels (FlashAttention 3 on Hopper); all else through our
own Triton kernels.

FlashInfer lays out a batch's work on the host, once for all layers, so it needs lengths and tables of cached prompts there
(`flashinfer_slots`). What is captured is laid out anew, in the same memory, before each replay of other lengths: a prefill of
whole prompts, and how beams read prompts. Where only the device knows the lengths otherwise, as in a captured prefill after
cached prefixes, or in a search that is launched, Triton's kernels run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import flashinfer
import torch
from torch import Tensor

from ..core.errors import HardwareError
from ..hardware.base.attention import (
    AttentionNeeds,
    AttentionPlan,
    AttentionSupport,
    HostPlan,
    KeyValueCache,
    PackedLayout,
    PageTable,
    SearchAttention,
)
from ..hardware.ops import PlatformOps
from ..hardware.ops.linear import QuantizedRows
from .flashinfer_slots import QUERY_TILE, WORKSPACE_BYTES, CapturedSlot, SearchSlot, Slot
from .triton import PackedPlan, TritonAttention, TritonSearch
from .triton_prompt import OwnTokens, join_own, quantizes

PLANS = 2  # batches whose plans hold at a time: the one that runs, and the next
# A captured prefill of so few tokens leaves the host's work to Triton's plan: laying it out takes the host 240 us. For one
# prompt of 2,464 tokens FlashInfer gains 1.1 ms in 28 layers (64 us a layer instead of 102, H200); where the two meet was not
# measured.
MOST_LEFT_TO_TRITON = 1024
# A captured search of fewer beams, a request's or all, leaves its prompts to Triton's kernel. Estimates, until measured: a tile
# of FlashInfer's has one head's beams of one request, and nothing is cut, so 1,024 beams of 16 heads make 128 tiles for the 132
# multiprocessors of an H200. Our kernel has the beams of all heads that share a kv head in one tile, and cuts prompts where
# tiles are few.
LEAST_WIDTH = QUERY_TILE
LEAST_BEAMS = 1024


class FlashInferAttention(TritonAttention):
    """Windows, soft caps and cached prefixes in 16 bits; no gradients. Compiles its kernels where they are not cached: minutes,
    at the build.

    A cache of another dtype than the model's is written, and Triton's kernels read it, in prefills that go on from a cached
    prefix and in searches: FlashAttention 3 takes an fp8 cache with fp8 queries only (FlashInfer 0.6.12, `utils.py`,
    `is_fa3_backend_supported`). Raises `attention_kernels_failed` where kernels cannot be compiled.
    """

    support = AttentionSupport(
        head_dims=(64, 128, 256),
        dtypes=(torch.bfloat16, torch.float16),
        platforms=("nvidia",),
        sliding_window=True,
        soft_cap=True,
        prefix=True,
    )
    device: ClassVar[str] = "cuda"  # the one that the runtime selected

    def __init__(self, needs: AttentionNeeds, ops: PlatformOps) -> None:
        super().__init__(needs, ops)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._slots = [Slot(self._workspace, needs) for _ in range(PLANS)]
        self._turn = 0
        # A captured kernel must read nothing but what a plan wrote. FlashAttention 3, on Hopper, does; FlashAttention 2 starts
        # blocks that no plan names, which read what lay in its memory before (FlashInfer 0.6.12, `batch_prefill.cu`).
        self._keeps_plans = flashinfer.utils.is_sm90a_supported(torch.device(self.device))
        try:
            self._next_slot().plan(torch.tensor([1]))  # compiles the kernels of both wrappers
        except Exception as error:  # the compiler is missing or of another version, or the cache cannot be written
            raise HardwareError(
                "attention_kernels_failed",
                f"FlashInfer {flashinfer.__version__} could not compile or load its kernels for this model: {error}.",
                "Install the CUDA toolkit that torch was built with (nvcc), or choose --attention triton.",
            ) from error

    def host_plan(self, num_tokens: int, places: int) -> HostPlan | None:
        if num_tokens <= MOST_LEFT_TO_TRITON or not self._keeps_plans:
            return None
        return CapturedSlot(self._workspace, self.needs, num_tokens, places)

    def search_host_plan(self, table: PageTable, cache: KeyValueCache, *, width: int) -> HostPlan | None:
        if not self._keeps_plans or self.needs.sliding_window is not None:
            return None
        if width < LEAST_WIDTH or len(table.pages) * width < LEAST_BEAMS or not self._reads(cache):
            return None
        return SearchSlot(self._workspace, self.needs, table, width)

    def packed(self, layout: PackedLayout, cache: KeyValueCache | None = None) -> AttentionPlan:
        if isinstance(layout.host_plan, CapturedSlot):
            return CapturedPlan(self.needs, self.ops, layout, cache, layout.host_plan)
        if layout.branch is not None or layout.host_lengths is None:
            return super().packed(layout, cache)
        if layout.table is None or layout.cached is None:
            slot = self._next_slot()
            lay_out = partial(slot.plan, layout.host_lengths)
            return RaggedPlan(self.needs, self.ops, layout, cache, slot, lay_out)
        if cache is None or layout.table.host_pages is None or not self._reads(cache):
            return super().packed(layout, cache)
        slot = self._next_slot()
        lay_out = partial(slot.plan_pages, layout.host_lengths, layout.table)
        return PagedPlan(self.needs, self.ops, layout, cache, slot, lay_out)

    def search(self, layout: PackedLayout, cache: KeyValueCache, *, width: int, num_kept: int) -> SearchAttention:
        if not isinstance(layout.host_plan, SearchSlot):
            return super().search(layout, cache, width=width, num_kept=num_kept)
        reader = SlotReader(self.needs, cache, layout.host_plan)
        return TritonSearch(self.needs, self.ops, layout, cache, width, num_kept, reader)

    def _reads(self, cache: KeyValueCache) -> bool:
        return cache.layer(0)[0].dtype == self.needs.dtype

    def _next_slot(self) -> Slot:
        """The least recently planned one."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        return slot


class PlannedPlan(PackedPlan):
    """A plan in a slot that later batches will plan anew. The first layer lays it out, when the device has work already."""

    def __init__(
        self,
        needs: AttentionNeeds,
        ops: PlatformOps,
        layout: PackedLayout,
        cache: KeyValueCache | None,
        slot: Slot,
        lay_out: Callable[[], None],
    ) -> None:
        super().__init__(needs, ops, layout, cache)
        self._slot, self._lay_out = slot, lay_out
        self._number: int | None = None

    def _planned(self) -> Slot:
        if self._number is None:
            self._lay_out()
            self._number = self._slot.number
        assert self._slot.number == self._number, f"{PLANS} later batches were planned: this plan's memory is theirs"
        return self._slot


class RaggedPlan(PlannedPlan):
    """Packed sequences, each against its own keys and values, which are read where they lie."""

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._planned().ragged.run(query, key, value).flatten(1)


class CapturedPlan(PackedPlan):
    """`RaggedPlan` of a prefill that is captured."""

    def __init__(
        self,
        needs: AttentionNeeds,
        ops: PlatformOps,
        layout: PackedLayout,
        cache: KeyValueCache | None,
        slot: CapturedSlot,
    ) -> None:
        super().__init__(needs, ops, layout, cache)
        self._ragged = slot.ragged

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._ragged.run(query, key, value).flatten(1)


class PagedPlan(PlannedPlan):
    """The last tokens of prompts, each against its whole prompt in the cache's pages, where its own keys are by now."""

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache, table = self._cache, self._layout.table
        assert cache is not None, "pages are a cache's"
        assert table is not None, "pages need a table"
        out = query.new_empty(query.shape)  # FlashInfer would fill its own with zeros first
        self._planned().paged.run(query, pages_of(cache, layer, table.page_size), out=out)
        return out.flatten(1)


class SlotReader:
    """Beams of a captured search: FlashInfer reads their prompts, and our own kernel joins their own tokens to the result.

    It is rounded to 16 bits in between.
    """

    def __init__(self, needs: AttentionNeeds, cache: KeyValueCache, slot: SearchSlot) -> None:
        self._needs, self._cache, self._slot = needs, cache, slot
        # One for all layers and passes: they run one after another.
        self._top = torch.empty((slot.num_rows, needs.num_heads), dtype=torch.float32, device=cache.layer(0)[0].device)

    @property
    def rotates(self) -> bool:
        """FlashInfer takes queries that are rotated."""
        return False

    @property
    def quantizes(self) -> bool:
        return quantizes(self._needs)

    def attend(self, layer: int, query: Tensor, result: Tensor, own: OwnTokens, into: QuantizedRows | None) -> None:
        pages = pages_of(self._cache, layer, self._slot.page_size)
        self._slot.paged.run(query, pages, out=result.view(query.shape), lse=self._top, return_lse=True)
        join_own(self._needs, query, self._top, result, own, into)


def pages_of(cache: KeyValueCache, layer: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, [pages, page_size, kv heads, D] each."""
    keys, values = (part.unflatten(0, (-1, page_size)) for part in cache.layer(layer))
    return keys, values
