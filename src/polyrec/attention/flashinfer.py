"""Prefill through FlashInfer's kernels (FlashAttention 3 on Hopper); the search stays with our own Triton kernels.

FlashInfer lays out a batch's work on the host, once for all layers, so it needs lengths and tables of cached prompts there. A
captured prefill of whole prompts is laid out anew before each replay, in the same memory. Where only the device knows the
lengths otherwise, as in a captured prefill after cached prefixes, Triton's plan runs.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

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
)
from ..hardware.ops import PlatformOps
from .triton import PackedPlan, TritonAttention

PLANS = 2  # batches whose plans hold at a time: the one that runs, and the next
# FlashInfer's memory for partial results of one query's keys; such splits, which would let the rounding of one request
# depend on its neighbours, are off. They would help a request alone that adds a few tokens to a long cached prompt; but
# without --eager such short rests are recorded, and run through Triton's plan, which splits by the request's own length.
WORKSPACE_BYTES = 1 << 20
# A captured prefill of so few tokens leaves the host's work to Triton's plan: laying it out takes the host 240 us. For one
# prompt of 2,464 tokens FlashInfer gains 1.1 ms in 28 layers (64 us a layer instead of 102, H200); where the two meet was not
# measured.
MOST_LEFT_TO_TRITON = 1024
QUERY_TILE = 128  # rows of one piece of work; FlashInfer 0.6.12 has larger ones for small heads
NUMBERS_A_PIECE = 7  # int32, that FlashInfer keeps


class Ragged(Protocol):
    """The part of `flashinfer.BatchPrefillWithRaggedKVCacheWrapper` that is used."""

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None: ...

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, *args: Any, **options: Any) -> None: ...

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Paged(Protocol):
    """The part of `flashinfer.BatchPrefillWithPagedKVCacheWrapper` that is used."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        *args: Any,
        **options: Any,
    ) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor: ...


class FlashInferAttention(TritonAttention):
    """Windows, soft caps and cached prefixes in 16 bits; no gradients. Compiles its kernels where they are not cached: minutes,
    at the build.

    A cache of another dtype than the model's is written, and read by the search; prefills that would read a cached prefix in
    it take Triton's plan: FlashAttention 3 takes an fp8 cache with fp8 queries only (FlashInfer 0.6.12, `utils.py`,
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

    def packed(self, layout: PackedLayout, cache: KeyValueCache | None = None) -> AttentionPlan:
        if isinstance(layout.host_plan, CapturedSlot):
            return CapturedPlan(self.needs, self.ops, layout, cache, layout.host_plan)
        if layout.branch is not None or layout.host_lengths is None:
            return super().packed(layout, cache)
        if layout.table is None or layout.cached is None:
            slot = self._next_slot()
            slot.plan(layout.host_lengths)
            return RaggedPlan(self.needs, self.ops, layout, cache, slot)
        if cache is None or layout.table.host_pages is None or cache.layer(0)[0].dtype != self.needs.dtype:
            return super().packed(layout, cache)
        slot = self._next_slot()
        slot.plan_pages(layout.host_lengths, layout.table)
        return PagedPlan(self.needs, self.ops, layout, cache, slot)

    def _next_slot(self) -> Slot:
        """The least recently planned one."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        return slot


class Slot:
    """Memory for one batch's plan. number: how often it was planned, by which a plan knows that its own still holds."""

    def __init__(self, workspace: Tensor, needs: AttentionNeeds) -> None:
        self.ragged: Ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        self.paged: Paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self.number = 0
        self._copied = torch.Event(device=workspace.device)
        self._heads, self._options = heads_of(needs), options_of(needs)

    def plan(self, lengths: Tensor) -> None:
        """Lays out the work of whole sequences of `lengths` int64 [R] (host), and queues its copy to the device."""
        self._copied.synchronize()  # the last plan may still be waiting in the pinned memory that is written now
        bounds = bounds_of(lengths)
        self.ragged.plan(bounds, bounds, *self._heads, **self._options)
        self._end()

    def plan_pages(self, lengths: Tensor, table: PageTable) -> None:
        """The same for the last `lengths` int64 [R] (host) tokens of the prompts in `table`, which has its host side."""
        assert table.host_pages is not None, "a table that only the device knows"
        assert table.host_cached is not None, "lengths that only the device knows"
        self._copied.synchronize()
        size, whole = table.page_size, lengths + table.host_cached
        num_pages = (whole + (size - 1)) // size
        owned = torch.arange(table.host_pages.shape[1]) < num_pages[:, None]
        last = whole - (num_pages - 1) * size  # tokens in each prompt's last page
        self.paged.plan(
            bounds_of(lengths),
            bounds_of(num_pages),
            table.host_pages[owned],
            last.int(),
            *self._heads,
            size,
            **self._options,
        )
        self._end()

    def _end(self) -> None:
        self._copied.record()
        self.number += 1


class CapturedSlot(HostPlan):
    """Memory for the plans of a captured prefill, which reads them at each replay. The rows behind a batch's prompts are laid
    out as one more, so that every row of the result is written."""

    def __init__(self, workspace: Tensor, needs: AttentionNeeds, num_tokens: int, places: int) -> None:
        bounds = torch.zeros((2, places + 2), dtype=torch.int32, device=workspace.device)
        self.ragged: Ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, qo_indptr_buf=bounds[0], kv_indptr_buf=bounds[1]
        )
        # The wrapper's own 8 MiB, on the device and pinned, would be held for every captured size.
        pieces = needs.num_heads * (num_tokens // QUERY_TILE + places + 2)
        numbers = torch.empty(
            max(WORKSPACE_BYTES, 8 * NUMBERS_A_PIECE * pieces), dtype=torch.uint8, device=workspace.device
        )
        self.ragged.reset_workspace_buffer(workspace, numbers)
        self._copied = torch.Event(device=workspace.device)
        self._num_tokens, self._places = num_tokens, places
        self._heads, self._options = heads_of(needs), options_of(needs)

    def renew(self, lengths: Tensor) -> None:
        self._copied.synchronize()  # the last plan may still be waiting in the pinned memory that is written now
        counts = torch.zeros(self._places + 1, dtype=torch.int64)
        counts[: len(lengths)] = lengths
        counts[-1] = self._num_tokens - int(lengths.sum())
        bounds = bounds_of(counts)
        self.ragged.plan(bounds, bounds, *self._heads, **self._options)
        self._copied.record()


def heads_of(needs: AttentionNeeds) -> tuple[int, int, int]:
    return needs.num_heads, needs.num_kv_heads, needs.head_dim


def options_of(needs: AttentionNeeds) -> dict[str, Any]:
    """What both wrappers' plans are told."""
    return {
        "causal": True,
        # FlashInfer does not count a query's own token.
        "window_left": -1 if needs.sliding_window is None else needs.sliding_window - 1,
        "logits_soft_cap": needs.soft_cap,
        "q_data_type": needs.dtype,
        "disable_split_kv": True,
    }


def bounds_of(counts: Tensor) -> Tensor:
    """int64 [R] -> int32 [R + 1]: where each one's part of a packed row begins, and the end."""
    bounds = torch.zeros(len(counts) + 1, dtype=torch.int32)
    bounds[1:] = torch.cumsum(counts, 0)
    return bounds


class PlannedPlan(PackedPlan):
    """A plan in a slot that later batches will plan anew."""

    def __init__(
        self, needs: AttentionNeeds, ops: PlatformOps, layout: PackedLayout, cache: KeyValueCache | None, slot: Slot
    ) -> None:
        super().__init__(needs, ops, layout, cache)
        self._slot = slot
        self._number = slot.number

    def _planned(self) -> Slot:
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
        keys, values = (part.unflatten(0, (-1, table.page_size)) for part in cache.layer(layer))
        out = query.new_empty(query.shape)  # FlashInfer would fill its own with zeros first
        return self._planned().paged.run(query, (keys, values), out=out).flatten(1)
