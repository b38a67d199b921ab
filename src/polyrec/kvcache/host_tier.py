"""Host memory for pages that leave the device, and the copies there and back, which no one waits for on the host.

All copies go through one stream of the tier's own and one staging tensor that nothing else uses, so they are in order among
themselves. Towards the main stream events keep the order: a page is copied away when the work that used it is done, what is
queued on the main stream later finds it copied away, or filled.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..hardware.base.runtime import Event, Runtime
from .free_list import FreeList
from .pool import KVPool

CHUNK_BYTES = 256 << 20  # of host memory pinned at a time, when it is needed: pinning all of it would delay the start
STAGING_BYTES = 64 << 20  # on the device: large enough for full speed of the bus, small beside a model


class HostTier:
    """A page of the host holds keys and values of one page of the pool, in all layers: [2, layers, page size · kv heads · D].

    max_bytes: the most that it may take of the host's memory. Memory is pinned on the engine's thread, since pinning it on
    another one would break a graph that is being captured. Errors: `host_cache_size`.
    """

    def __init__(
        self,
        pool: KVPool,
        page_size: int,
        runtime: Runtime,
        max_bytes: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        page_bytes = self.page_bytes = page_size * pool.bytes_per_token
        check_size(max_bytes, page_bytes)
        self.num_pages = max_bytes // page_bytes
        self._runtime = runtime
        self._stream = runtime.stream()
        self._halves = (by_page(pool.keys, page_size), by_page(pool.values, page_size))
        self._page_shape = (2, *self._halves[0].shape[1:])
        self._dtype = self._halves[0].dtype
        self._chunk_pages = max(1, chunk_bytes // page_bytes)
        self._chunks: list[Tensor] = []
        self._free = FreeList(self.num_pages)
        self._num_pinned = 0
        self._stream.wait_stream(runtime.current_stream())  # which clears the pool
        with runtime.use_stream(self._stream):  # whose memory the staging tensor then is
            num = min(max(1, staging_bytes // page_bytes), self.num_pages)
            self._staging = torch.empty((num, *self._page_shape), dtype=self._dtype, device=pool.keys.device)

    @property
    def num_free(self) -> int:
        """Pages of pinned memory that hold nothing."""
        return len(self._free)

    def reserve(self, num_pages: int) -> int:
        """Pins memory, as far as it may, until that many pages are free; returns how many are."""
        while self.num_free < num_pages and self._num_pinned < self.num_pages:
            num = min(self._chunk_pages, self.num_pages - self._num_pinned)
            self._chunks.append(self._runtime.pin(torch.empty((num, *self._page_shape), dtype=self._dtype)))
            self._free.give(np.arange(self._num_pinned, self._num_pinned + num, dtype=np.int32))
            self._num_pinned += num
        return self.num_free

    def allocate(self, num_pages: int) -> np.ndarray:
        """int32 [num_pages], of those that are free."""
        return self._free.take(num_pages)

    def free(self, host_pages: np.ndarray) -> None:
        """A copy from there may be on its way still: later ones to there come after it."""
        self._free.give(host_pages)

    @torch.inference_mode()  # as whoever made the pool may have been in
    def store(self, pages: np.ndarray, host_pages: np.ndarray) -> None:
        """Copies pages of the pool, int32 [n], to pages of the host, int32 [n]; `wait` was called for what writes them.

        What is queued on the current stream from now on may overwrite the pages.
        """
        gathered = self._runtime.event()
        with self._runtime.use_stream(self._stream):
            for part in self._parts(len(pages)):
                staging = self._staging[: part.stop - part.start]
                index = self._index(pages[part])
                for half, content in enumerate(self._halves):
                    staging[:, half] = content[index]
                if part.stop == len(pages):
                    gathered.record(self._stream)
                for host, staged in self._stretches(host_pages[part], staging):
                    host.copy_(staged, non_blocking=True)
        self._runtime.current_stream().wait_event(gathered)

    @torch.inference_mode()
    def load(self, host_pages: np.ndarray, pages: np.ndarray) -> None:
        """The way back. What is queued on the current stream from now on finds the pages filled."""
        with self._runtime.use_stream(self._stream):
            for part in self._parts(len(pages)):
                staging = self._staging[: part.stop - part.start]
                for host, staged in self._stretches(host_pages[part], staging):
                    staged.copy_(host, non_blocking=True)
                index = self._index(pages[part])
                for half, content in enumerate(self._halves):
                    content[index] = staging[:, half]
        self._runtime.current_stream().wait_event(self._recorded(self._stream))

    def mark(self) -> Event:
        """An event behind all that is queued on the current stream now."""
        return self._recorded(self._runtime.current_stream())

    def wait(self, event: Event) -> None:
        """Later copies start behind the event."""
        self._stream.wait_event(event)

    def _recorded(self, stream: object) -> Event:
        event = self._runtime.event()
        event.record(stream)
        return event

    def _index(self, pages: np.ndarray) -> Tensor:
        return self._runtime.to_device(torch.from_numpy(pages.astype(np.int64)))

    def _parts(self, num_pages: int) -> Iterator[slice]:
        """What fits into the staging tensor at a time."""
        size = len(self._staging)
        return (slice(start, min(start + size, num_pages)) for start in range(0, num_pages, size))

    def _stretches(self, host_pages: np.ndarray, staging: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Neighbours in the host's memory and their part of the staging tensor: one copy each."""
        breaks = (np.diff(host_pages) != 1) | (host_pages[1:] % self._chunk_pages == 0)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1, [len(host_pages)]]).tolist()
        for start, stop in itertools.pairwise(starts):
            chunk, first = divmod(int(host_pages[start]), self._chunk_pages)
            yield self._chunks[chunk][first : first + stop - start], staging[start:stop]


def by_page(tensor: Tensor, page_size: int) -> Tensor:
    """[layers, slots, kv heads, D] as [pages, layers, words of a page]: copies are of words, whatever the numbers are."""
    layers, slots, num_kv_heads, head_dim = tensor.shape
    assert slots % page_size == 0, f"{slots} slots are no pages of {page_size}"
    rows = tensor.view(layers, slots // page_size, page_size * num_kv_heads * head_dim)
    word = torch.int64 if rows.shape[-1] * rows.element_size() % 8 == 0 else torch.uint8
    return rows.view(word).transpose(0, 1)


def check_size(max_bytes: int, page_bytes: int) -> None:
    """Errors: `host_cache_size`."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not page_bytes <= max_bytes <= there:
        raise ConfigError(
            "host_cache_size",
            f"The host's part of the key-value cache would be {max_bytes:,} bytes; a page has {page_bytes:,} bytes, and the "
            f"machine {there:,}.",
            "Choose a size between these with --host-cache-gib, or 0 for none.",
        )
