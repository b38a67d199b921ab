"""Memory for FlashInfer's plans: the host lays out there which of its programs does what of a batch, once for all layers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

import flashinfer
import torch
from torch import Tensor

from ..hardware.base.attention import AttentionNeeds, HostPlan, PageTable

# FlashInfer's memory for partial results of one query's keys; such splits, which would let the rounding of one request
# depend on its neighbours, are off. They would help a request alone that adds a few tokens to a long cached prompt; but
# without --eager such short rests are recorded, and run through Triton's plan, which splits by the request's own length.
WORKSPACE_BYTES = 1 << 20
QUERY_TILE = 128  # rows of one piece of work; FlashInfer 0.6.12 has larger ones for small heads
NUMBERS_A_PIECE = 7  # int32, that FlashInfer keeps


class Ragged(Protocol):
    """The part of `flashinfer.BatchPrefillWithRaggedKVCacheWrapper` that is used."""

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None: ...

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, *args: Any, **options: Any) -> None: ...

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Paged(Protocol):
    """The part of `flashinfer.BatchPrefillWithPagedKVCacheWrapper` that is used."""

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None: ...

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        *args: Any,
        **options: Any,
    ) -> None: ...

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> object: ...


class Slot:
    """Memory for one batch's plan. number: how often it was planned, by which a plan knows that its own still holds."""

    def __init__(self, workspace: Tensor, needs: AttentionNeeds) -> None:
        self.ragged: Ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        self.paged: Paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self.number = 0
        self._planned: Tensor | None = None  # lengths that the plan of whole sequences is for
        self._copied = torch.Event(device=workspace.device)
        self._heads, self._options = heads_of(needs), options_of(needs)

    def plan(self, lengths: Tensor) -> None:
        """Lays out the work of whole sequences of `lengths` int64 [R] (host), and queues its copy to the device; where they are
        the last plan's, that one holds: for 8 of 5,001 tokens it takes 2.4 ms, in which a device would wait."""
        if self._planned is not None and torch.equal(lengths, self._planned):
            return
        self._planned = None  # until all of the new one is there
        self._copied.synchronize()  # the last plan may still be waiting in the pinned memory that is written now
        bounds = pinned(bounds_of(lengths))
        self.ragged.plan(bounds, bounds, *self._heads, **self._options)
        self._end()
        self._planned = lengths.clone()

    def plan_pages(self, lengths: Tensor, table: PageTable) -> None:
        """The same for the last `lengths` int64 [R] (host) tokens of the prompts in `table`, which has its host side."""
        assert table.host_pages is not None, "a table that only the device knows"
        assert table.host_cached is not None, "lengths that only the device knows"
        self._copied.synchronize()
        size, whole = table.page_size, lengths + table.host_cached
        num_pages = (whole + (size - 1)) // size
        owned = torch.arange(table.host_pages.shape[1]) < num_pages[:, None]
        self.paged.plan(
            bounds_of(lengths),
            bounds_of(num_pages),
            table.host_pages[owned],
            in_last_page(whole, size),
            *self._heads,
            size,
            **self._options,
        )
        self._end()

    def _end(self) -> None:
        self._copied.record()
        self.number += 1


class RenewedPlan(HostPlan):
    """A plan in memory of its own, which captured kernels read at each replay. It follows from the lengths alone, so a batch of
    the last one's lengths needs none: requests one at a time whose histories are cut to one length, say."""

    def __init__(self, workspace: Tensor) -> None:
        self._copied = torch.Event(device=workspace.device)
        self._planned: Tensor | None = None

    def renew(self, lengths: Tensor) -> None:
        if self._planned is not None and torch.equal(lengths, self._planned):
            return
        self._planned = None  # until all of the new one is there
        self._copied.synchronize()  # the last plan may still be waiting in the pinned memory that is written now
        self._plan(lengths)
        self._copied.record()
        self._planned = lengths.clone()

    @abstractmethod
    def _plan(self, lengths: Tensor) -> None:
        """Lays out the work of sequences of `lengths` int64 [R] (host), and queues its copy to the device."""


class CapturedSlot(RenewedPlan):
    """Memory for the plans of a captured prefill, which reads them at each replay. The rows behind a batch's prompts are laid
    out as one more, so that every row of the result is written."""

    def __init__(self, workspace: Tensor, needs: AttentionNeeds, num_tokens: int, places: int) -> None:
        super().__init__(workspace)
        bounds = torch.zeros((2, places + 2), dtype=torch.int32, device=workspace.device)
        self.ragged: Ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, qo_indptr_buf=bounds[0], kv_indptr_buf=bounds[1]
        )
        self.ragged.reset_workspace_buffer(workspace, numbers_of(workspace, needs, num_tokens, places + 1))
        self._num_tokens, self._places = num_tokens, places
        self._heads, self._options = heads_of(needs), options_of(needs)

    def _plan(self, lengths: Tensor) -> None:
        counts = torch.zeros(self._places + 1, dtype=torch.int64)
        counts[: len(lengths)] = lengths
        counts[-1] = self._num_tokens - int(lengths.sum())
        bounds = pinned(bounds_of(counts))
        self.ragged.plan(bounds, bounds, *self._heads, **self._options)


class SearchSlot(RenewedPlan):
    """Memory for the plans of a captured search, whose kernels read them at each replay: one for all passes over `width` beams
    of each prompt in the table.

    The table stays on the device: all columns of a prompt's row are its pages, of which its length says how many hold tokens.
    A place without a prompt reads one key of the page that its row begins with, so that every row of the result is written.
    """

    def __init__(self, workspace: Tensor, needs: AttentionNeeds, table: PageTable, width: int) -> None:
        super().__init__(workspace)
        places, columns = table.pages.shape
        bounds = torch.zeros((2, places + 1), dtype=torch.int32, device=workspace.device)
        self._pages = table.pages.view(-1)
        self.paged: Paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=bounds[0],
            paged_kv_indptr_buf=bounds[1],
            paged_kv_indices_buf=self._pages,
            paged_kv_last_page_len_buf=torch.zeros(places, dtype=torch.int32, device=workspace.device),
        )
        self.num_rows, self.page_size = places * width, table.page_size
        self.paged.reset_workspace_buffer(workspace, numbers_of(workspace, needs, self.num_rows, places))
        self._rows, self._columns = (pinned(bounds_of(torch.full((places,), each))) for each in (width, columns))
        self._heads, self._options = heads_of(needs), options_of(needs) | {"causal": False}

    def _plan(self, lengths: Tensor) -> None:
        whole = torch.ones(len(self._rows) - 1, dtype=torch.int32)
        whole[: len(lengths)] = lengths
        # FlashAttention 3 takes lengths from `seq_lens` (FlashInfer 0.6.12, `plan`); else they would follow from the columns.
        # The pages are given as they lie in their buffer: nothing is copied, and nothing waits for the prefill before.
        self.paged.plan(
            self._rows,
            self._columns,
            self._pages,
            pinned(in_last_page(whole, self.page_size)),
            *self._heads,
            self.page_size,
            seq_lens=pinned(whole),
            **self._options,
        )


def numbers_of(workspace: Tensor, needs: AttentionNeeds, num_rows: int, places: int) -> Tensor:
    """Room for the plans of a captured kernel. The wrapper's own 8 MiB, on the device and pinned, would be held for every
    captured size."""
    pieces = needs.num_heads * (num_rows // QUERY_TILE + places + 1)
    num_bytes = max(WORKSPACE_BYTES, 8 * NUMBERS_A_PIECE * pieces)
    return torch.empty(num_bytes, dtype=torch.uint8, device=workspace.device)


def heads_of(needs: AttentionNeeds) -> tuple[int, int, int]:
    return needs.num_heads, needs.num_kv_heads, needs.head_dim


def options_of(needs: AttentionNeeds) -> dict[str, Any]:
    """What all wrappers' plans are told."""
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


def pinned(tensor: Tensor) -> Tensor:
    """A host tensor from which a copy to the device makes nobody wait; itself where there is no device (in tests)."""
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor


def in_last_page(lengths: Tensor, page_size: int) -> Tensor:
    """int32 [R]: tokens in the last page of each prompt."""
    return ((lengths - 1) % page_size + 1).int()
