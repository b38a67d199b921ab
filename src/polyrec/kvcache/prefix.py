"""Which pages hold which prompt's keys and values, and which prompts' beginnings are there already.

A page is free, in use (a prompt is admitted and not released), or kept for later prompts and evictable. Kept pages that leave
the device go to the host's memory, where there is a tier for that, and are found there. The engine's thread owns all of it.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from .free_list import FreeList
from .tree import Match, Run, Tree, UnusedRuns


class Tier(Protocol):
    """Where pages go that leave the device: `host_tier.HostTier`. It has pages of its own, and orders copies by events."""

    @property
    def num_free(self) -> int: ...

    def reserve(self, num_pages: int) -> int:
        """Grows, as far as it may, until that many pages are free; returns how many are."""
        ...

    def allocate(self, num_pages: int) -> np.ndarray: ...

    def free(self, host_pages: np.ndarray) -> None: ...

    def store(self, pages: np.ndarray, host_pages: np.ndarray) -> None:
        """Queues copies from the device, ahead of whatever is queued on the device from now on."""
        ...

    def load(self, host_pages: np.ndarray, pages: np.ndarray) -> None:
        """Queues copies to the device, ahead of whatever is queued on the device from now on."""
        ...

    def mark(self) -> Any:
        """An event behind all that is queued on the device now."""
        ...

    def wait(self, event: Any) -> None:
        """Later copies start behind the event."""
        ...


@dataclass
class Held:
    """The pages of one admitted prompt of T tokens.

    pages: int32 [ceil(T / page size)], in the order of its tokens. num_cached: how many of its first tokens need no prefill, a
    multiple of the page size and at most T - 1. The rest is the cache's. run: the last run that is locked. own: pages that
    nobody else finds. launched: the tier's event behind the work that writes them.
    """

    pages: np.ndarray
    num_cached: int
    run: Run
    own: list[np.ndarray]
    launched: Any = None


@dataclass
class CacheStats:
    """Counts since the start. prompt_tokens: of admitted prompts. hit_tokens: those of them that needed no prefill.
    host_hit_tokens: those of these that came back from the host. evicted_pages: kept pages that left the device.
    stored_pages: those of them that went to the host. dropped_pages: pages that the host gave up for others."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    evicted_pages: int = 0
    stored_pages: int = 0
    dropped_pages: int = 0


class PrefixCache:
    """Pages 1 … num_pages - 1 of a pool; page 0 is nobody's. tier: for kept pages that leave the device. enabled: whether pages
    are found again."""

    def __init__(self, num_pages: int, page_size: int, tier: Tier | None = None, enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self._num_pages = num_pages
        self._tier = tier
        self._tree = Tree(page_size)
        self._free = FreeList(num_pages)
        self._free.give(np.arange(1, num_pages, dtype=np.int32))
        self._unused = UnusedRuns()
        self._on_host = UnusedRuns()
        self._stats = CacheStats()

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Pages that are kept and that nobody uses."""
        return self._unused.num_pages

    @property
    def num_used(self) -> int:
        """Pages of prompts that are admitted and not released."""
        return self._num_pages - 1 - self.num_free - self.num_evictable

    @property
    def num_on_host(self) -> int:
        """Kept pages that left the device and are found in the host's memory."""
        return self._on_host.num_pages

    @property
    def stats(self) -> CacheStats:
        """As they are now."""
        return replace(self._stats)

    def num_pages_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def peek(self, prompt: np.ndarray) -> int:
        """How many tokens of the prompt, integers [T], would be cached if it were admitted now."""
        return self._match(prompt).num_pages * self.page_size

    def admit(self, prompt: np.ndarray) -> Held | None:
        """Pages for a prompt, integers [T], T ≥ 1. None: too few are free or can be evicted; then nothing has changed."""
        run, num_cached, num_extra = self._match(prompt)
        num_on_host, num_unused = count_pages(run, num_extra)
        num_new = self.num_pages_needed(len(prompt)) - num_cached
        if num_new + num_on_host > self.num_free + self.num_evictable - num_unused:
            return None
        if num_extra:
            run = self._tree.split(run, len(run.pages) - num_extra)
        self._lock(run, self._tree.root)
        self._evict(num_new + num_on_host - self.num_free)
        if num_on_host:
            self._load(run)
        own = self._free.take(num_new)
        self._stats.prompt_tokens += len(prompt)
        self._stats.hit_tokens += num_cached * self.page_size
        self._stats.host_hit_tokens += num_on_host * self.page_size
        return Held(np.concatenate([*pages_to(run), own]), num_cached * self.page_size, run, [own])

    def keep(self, held: Held, prompt: np.ndarray) -> None:
        """Later prompts find the prompt's whole pages. To be called once, when the work that uses them has been queued."""
        if self._tier is not None:
            held.launched = self._tier.mark()
        if not self.enabled:
            return
        key, start, end = self._tree.key(prompt), held.num_cached // self.page_size, len(prompt) // self.page_size
        run, held.own = held.run, []
        while start < end:
            child = self._tree.child(run, key, start)
            if child is None:
                child = self._tree.add(run, key, start, held.pages[start:end])
                self._unused.add(child)
            else:  # another prompt of these tokens was kept since this one was admitted
                num_same = self._tree.num_same(child, key, start, end)
                if num_same < len(child.pages):
                    child = self._tree.split(child, num_same)
                pages = held.pages[start : start + num_same]
                if child.on_host:
                    self._replace(child, pages)
                else:
                    held.own.append(pages)
            run = child
            start += len(child.pages)
        held.own.append(held.pages[end:])
        self._lock(run, held.run)
        held.run = run

    def release(self, held: Held) -> None:
        """The prompt's answer is out: pages that were not kept are free, the others may be evicted. To be called once."""
        if self._tier is not None:
            self._tier.wait(held.launched or self._tier.mark())
        run = held.run
        while run.parent is not None:
            run.num_locks -= 1
            if run.num_locks == 0:
                self._unused.add(run)
            run = run.parent
        for pages in held.own:
            self._free.give(pages)

    def make_room(self, num_pages: int) -> None:
        """Evicts ahead of need, until that many pages are free, so that copies to the host run beside the batch that was
        launched last. Without a tier eviction takes no time, and pages stay while they can."""
        if self._tier is not None:
            self._evict(min(num_pages - self.num_free, self.num_evictable))

    def clear(self) -> None:
        """Forgets every kept page that nobody uses."""
        self._drop_from_host(self.num_on_host)
        for run in self._unused.pop(self.num_evictable, self._tree):
            self._free.give(run.pages)
            self._tree.remove(run)

    def _match(self, prompt: np.ndarray) -> Match:
        """The last token is always computed: its hidden state begins the search."""
        if not self.enabled:
            return Match(self._tree.root, 0, 0)
        return self._tree.match(self._tree.key(prompt), (len(prompt) - 1) // self.page_size)

    def _lock(self, run: Run, above: Run) -> None:
        """Locks a run and those over it, up to `above`, which is left as it is."""
        while run is not above:
            if run.num_locks == 0:
                (self._on_host if run.on_host else self._unused).remove(run)
            run.num_locks += 1
            assert run.parent is not None
            run = run.parent

    def _load(self, run: Run) -> None:
        """Brings the locked runs from the root to this one that are on the host to the device."""
        assert self._tier is not None
        runs = []
        while run.on_host:
            runs.append(run)
            assert run.parent is not None
            run = run.parent
        host_pages = np.concatenate([run.pages for run in runs])
        pages = self._free.take(len(host_pages))
        self._tier.load(host_pages, pages)
        self._tier.free(host_pages)
        deal(pages, runs)
        for run in runs:
            run.on_host = False

    def _replace(self, run: Run, pages: np.ndarray) -> None:
        """A prompt computed anew what is on the host by now, or was not yet found: its pages take the place of the host's."""
        assert self._tier is not None
        self._on_host.remove(run)
        self._tier.free(run.pages)
        run.pages, run.on_host = pages, False
        self._unused.add(run)

    def _evict(self, num_pages: int) -> None:
        """Frees that many pages of the device: of what was used longest ago."""
        if num_pages <= 0:
            return
        runs = self._unused.pop(num_pages, self._tree)
        self._free.give(np.concatenate([run.pages for run in runs]))
        self._stats.evicted_pages += num_pages
        if self._tier is not None:
            runs = self._store(runs, num_pages, self._tier)
        for run in runs:
            self._tree.remove(run)

    def _store(self, runs: list[Run], num_pages: int, tier: Tier) -> list[Run]:
        """Moves runs, oldest first, to the host; returns those for which it has no room, the oldest."""
        num_stored = min(num_pages, tier.reserve(num_pages) + self.num_on_host)
        num_dropped = max(0, num_stored - tier.num_free)
        self._drop_from_host(num_dropped)
        self._stats.dropped_pages += num_dropped
        queue = UnusedRuns()
        for run in runs:
            queue.add(run)
        dropped = queue.pop(num_pages - num_stored, self._tree)
        stored = queue.pop(num_stored, self._tree)
        if stored:
            host_pages = tier.allocate(num_stored)
            tier.store(np.concatenate([run.pages for run in stored]), host_pages)
            deal(host_pages, stored)
            for run in stored:
                run.on_host = True
                self._on_host.add(run)
            self._stats.stored_pages += num_stored
        return dropped

    def _drop_from_host(self, num_pages: int) -> None:
        """Forgets that many pages of the host: of what went there longest ago."""
        if self._tier is None:
            return
        for run in self._on_host.pop(num_pages, self._tree):
            self._tier.free(run.pages)
            self._tree.remove(run)


def pages_to(run: Run) -> list[np.ndarray]:
    """Pages of the runs from the root to this one."""
    parts = []
    while run.parent is not None:
        parts.append(run.pages)
        run = run.parent
    return parts[::-1]


def count_pages(run: Run, num_extra: int) -> tuple[int, int]:
    """Of a run but its last `num_extra` pages, and of those above it: how many pages are on the host, and how many on the
    device that nobody uses."""
    num_on_host = num_unused = 0
    while run.parent is not None:
        num, num_extra = len(run.pages) - num_extra, 0
        if run.on_host:
            num_on_host += num
        elif run.num_locks == 0:
            num_unused += num
        run = run.parent
    return num_on_host, num_unused


def deal(pages: np.ndarray, runs: list[Run]) -> None:
    """Gives runs pages in place of those they have, as many to each."""
    start = 0
    for run in runs:
        run.pages = pages[start : start + len(run.pages)]
        start += len(run.pages)
