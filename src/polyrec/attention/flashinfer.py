"""Prefill through FlashInfer's kernels (FlashAttention 3 on Hopper); the search stays with our own Triton kernels.

FlashInfer lays out a batch's work on the host, once for all layers, so it needs lengths there. Where only the device knows
them, as in a captured prefill, Triton's plan runs.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import flashinfer
import torch
from torch import Tensor

from ..core.errors import HardwareError
from ..hardware.base.attention import AttentionNeeds, AttentionPlan, AttentionSupport, KeyValueCache, PackedLayout
from ..hardware.ops import PlatformOps
from .triton import PackedPlan, TritonAttention

PLANS = 2  # batches whose plans hold at a time: the one that runs, and the next
# FlashInfer's memory for partial results of one query's keys; such splits, which would let the rounding of one request
# depend on its neighbours, are off.
WORKSPACE_BYTES = 1 << 20


class Ragged(Protocol):
    """The part of `flashinfer.BatchPrefillWithRaggedKVCacheWrapper` that is used."""

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, *args: Any, **options: Any) -> None: ...

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class FlashInferAttention(TritonAttention):
    """Windows and soft caps in 16 bits; no gradients. Compiles its kernels where they are not cached: minutes, at the build.

    Raises `attention_kernels_failed` where they cannot be compiled.
    """

    support = AttentionSupport(
        head_dims=(64, 128, 256),
        dtypes=(torch.bfloat16, torch.float16),
        platforms=("nvidia",),
        sliding_window=True,
        soft_cap=True,
    )
    device: ClassVar[str] = "cuda"  # the one that the runtime selected

    def __init__(self, needs: AttentionNeeds, ops: PlatformOps) -> None:
        super().__init__(needs, ops)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._slots = [Slot(workspace) for _ in range(PLANS)]
        self._turn = 0
        try:
            self._plan(torch.tensor([1]))
        except Exception as error:  # the compiler is missing or of another version, or the cache cannot be written
            raise HardwareError(
                "attention_kernels_failed",
                f"FlashInfer {flashinfer.__version__} could not compile or load its kernels for this model: {error}.",
                "Install the CUDA toolkit that torch was built with (nvcc), or choose --attention triton.",
            ) from error

    def packed(self, layout: PackedLayout, cache: KeyValueCache | None = None) -> AttentionPlan:
        if layout.branch is not None or layout.host_lengths is None:
            return super().packed(layout, cache)
        return RaggedPlan(self.needs, self.ops, layout, cache, self._plan(layout.host_lengths))

    def _plan(self, lengths: Tensor) -> Slot:
        """The least recently used slot, now for sequences of `lengths` int64 [R] (host)."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        slot.plan(lengths, self.needs)
        return slot


class Slot:
    """Memory for one batch's plan. number: how often it was planned, by which a plan knows that its own still holds."""

    def __init__(self, workspace: Tensor) -> None:
        self.ragged: Ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        self.number = 0
        self._copied = torch.Event(device=workspace.device)

    def plan(self, lengths: Tensor, needs: AttentionNeeds) -> None:
        """Lays out the work of sequences of `lengths` int64 [R] (host), and queues its copy to the device."""
        self._copied.synchronize()  # the last plan may still be waiting in the pinned memory that is written now
        bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        bounds[1:] = torch.cumsum(lengths, 0)
        self.ragged.plan(
            bounds,
            bounds,
            needs.num_heads,
            needs.num_kv_heads,
            needs.head_dim,
            causal=True,
            window_left=-1 if needs.sliding_window is None else needs.sliding_window - 1,  # its own token not counted
            logits_soft_cap=needs.soft_cap,
            q_data_type=needs.dtype,
            disable_split_kv=True,
        )
        self._copied.record()
        self.number += 1


class RaggedPlan(PackedPlan):
    """Packed sequences, each against its own keys and values, which are read where they lie."""

    def __init__(
        self, needs: AttentionNeeds, ops: PlatformOps, layout: PackedLayout, cache: KeyValueCache | None, slot: Slot
    ) -> None:
        super().__init__(needs, ops, layout, cache)
        self._slot = slot
        self._number = slot.number

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert self._slot.number == self._number, f"{PLANS} later batches were planned: this plan's memory is theirs"
        return self._slot.ragged.run(query, key, value).flatten(1)
