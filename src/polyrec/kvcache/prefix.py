"""Which pages hold which prompt's keys and values, and which prompts' beginnings are there already: a radix tree over pages.

A run is a stretch of pages that always follow each other. Runs that some prompt uses are locked, with all runs above them; the
others are idle, in an order in which a run comes before the run above it, so the first one has nothing below it on the device
and can be evicted. The engine's thread owns all of it. Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from .free_list import FreeList

TOKEN = np.dtype(np.int32)  # of the tree's keys


class Run:
    """tokens: of its pages, as bytes. pages: int32 [n] on the device. children: by the tokens of their first page."""

    __slots__ = ("children", "num_locks", "pages", "parent", "tokens")

    def __init__(self, parent: Run | None, tokens: bytes, pages: np.ndarray) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Run] = {}
        self.num_locks = 0


@dataclass
class Held:
    """The pages of one admitted prompt of T tokens.

    pages: int32 [ceil(T / page size)], in the order of its tokens. num_cached: how many of its first tokens need no prefill, a
    multiple of the page size and at most T - 1. run, own: the cache's; the last run that is locked, and the pages that nobody
    else finds.
    """

    pages: np.ndarray
    num_cached: int
    run: Run
    own: list[np.ndarray]


@dataclass(frozen=True)
class CacheStats:
    """Counts since the start. prompt_tokens: of admitted prompts; hit_tokens: those of them that needed no prefill;
    evicted_pages: kept pages that made room for others."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0


class PrefixCache:
    """Pages 1 … num_pages - 1 of a pool; page 0 is nobody's. enabled: whether a page is found again."""

    def __init__(self, num_pages: int, page_size: int, tier: None = None, enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self._page_bytes = page_size * TOKEN.itemsize
        self._num_pages = num_pages
        self._free = FreeList(num_pages)
        self._free.give(np.arange(num_pages - 1, 0, -1, dtype=np.int32))
        self._root = Run(None, b"", self._free.take(0))
        self._idle: OrderedDict[Run, None] = OrderedDict()
        self._num_idle_pages = 0
        self._prompt_tokens = self._hit_tokens = self._evicted_pages = 0

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Pages that are kept and that nobody uses."""
        return self._num_idle_pages

    @property
    def num_used(self) -> int:
        """Pages of prompts that are admitted and not released."""
        return self._num_pages - 1 - self.num_free - self.num_evictable

    @property
    def stats(self) -> CacheStats:
        return CacheStats(self._prompt_tokens, self._hit_tokens, self._evicted_pages)

    def num_pages_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def peek(self, prompt: np.ndarray) -> int:
        """How many tokens of the prompt, integers [T], would be cached if it were admitted now."""
        return self._match(self._key(prompt), self._most_cached(prompt))[1] * self.page_size

    def admit(self, prompt: np.ndarray) -> Held | None:
        """Pages for a prompt, integers [T], T ≥ 1. None: too few are free or can be evicted; then nothing has changed."""
        run, num_cached, surplus = self._match(self._key(prompt), self._most_cached(prompt))
        num_new = self.num_pages_needed(len(prompt)) - num_cached
        if num_new > self.num_free + self.num_evictable - self._num_idle_from(run, surplus):
            return None
        if surplus:
            run = self._split(run, len(run.pages) - surplus)
        self._lock(run, self._root)
        self._evict(num_new - self.num_free)
        own = self._free.take(num_new)
        self._prompt_tokens += len(prompt)
        self._hit_tokens += num_cached * self.page_size
        return Held(np.concatenate([*self._pages_to(run), own]), num_cached * self.page_size, run, [own])

    def keep(self, held: Held, prompt: np.ndarray) -> None:
        """Later prompts find the prompt's whole pages. To be called once, when the work that writes them has been queued."""
        if not self.enabled:
            return
        key, start, end = self._key(prompt), held.num_cached // self.page_size, len(prompt) // self.page_size
        run, held.own = held.run, []
        while start < end:
            child = run.children.get(self._first(key, start))
            if child is None:
                child = Run(run, key[start * self._page_bytes : end * self._page_bytes], held.pages[start:end])
                run.children[self._first(key, start)] = child
                self._num_idle_pages += end - start
                num_same = end - start
            else:  # another prompt of these tokens was kept since this one was admitted
                num_same = self._num_same(child, key, start, end)
                held.own.append(held.pages[start : start + num_same])
                if num_same < len(child.pages):
                    child = self._split(child, num_same)
            run = child
            start += num_same
        held.own.append(held.pages[end:])
        self._lock(run, held.run)
        held.run = run

    def release(self, held: Held) -> None:
        """The prompt's answer is out: pages that were not kept are free, the others may be evicted. To be called once."""
        run = held.run
        while run.parent is not None:
            run.num_locks -= 1
            if run.num_locks == 0:
                self._idle[run] = None
                self._num_idle_pages += len(run.pages)
            run = run.parent
        for pages in held.own:
            self._free.give(pages)

    def make_room(self, num_pages: int) -> None:
        """Evicts ahead of need where that takes long, which it does not here."""

    def clear(self) -> None:
        """Forgets every kept page that nobody uses."""
        self._drop_idle(self._num_idle_pages)

    def _key(self, prompt: np.ndarray) -> bytes:
        return prompt.astype(TOKEN).tobytes() if self.enabled else b""

    def _most_cached(self, prompt: np.ndarray) -> int:
        """Pages. The last token is always computed: its hidden state begins the search."""
        return (len(prompt) - 1) // self.page_size if self.enabled else 0

    def _first(self, key: bytes, page: int) -> bytes:
        return key[page * self._page_bytes : (page + 1) * self._page_bytes]

    def _match(self, key: bytes, end: int) -> tuple[Run, int, int]:
        """The last run that a prompt's first `end` pages share, how many of them are found, and how many pages of that last run
        are too many."""
        run, start = self._root, 0
        while start < end:
            child = run.children.get(self._first(key, start))
            if child is None:
                break
            num_same = self._num_same(child, key, start, end)
            run, start = child, start + num_same
            if num_same < len(child.pages):
                return run, start, len(child.pages) - num_same
        return run, start, 0

    def _num_same(self, run: Run, key: bytes, start: int, end: int) -> int:
        """How many pages of the run are those of the key from page `start` on."""
        num, offset = min(len(run.pages), end - start), start * self._page_bytes
        if num == len(run.pages) and key.startswith(run.tokens, offset):
            return num
        count = num * self.page_size
        differs = np.frombuffer(run.tokens, TOKEN, count) != np.frombuffer(key, TOKEN, count, offset)
        first = int(differs.argmax())
        return first // self.page_size if differs[first] else num

    def _split(self, run: Run, num_upper: int) -> Run:
        """Cuts a run in two; returns the upper, new one. `run` stays the lower one, which those who locked it last know."""
        assert run.parent is not None
        upper = Run(run.parent, run.tokens[: num_upper * self._page_bytes], run.pages[:num_upper])
        upper.num_locks = run.num_locks
        run.parent.children[self._first(run.tokens, 0)] = upper
        run.parent, run.tokens, run.pages = upper, run.tokens[num_upper * self._page_bytes :], run.pages[num_upper:]
        upper.children[self._first(run.tokens, 0)] = run
        return upper

    def _pages_to(self, run: Run) -> list[np.ndarray]:
        """Pages of the runs from the root to this one."""
        parts = []
        while run.parent is not None:
            parts.append(run.pages)
            run = run.parent
        return parts[::-1]

    def _num_idle_from(self, run: Run, surplus: int) -> int:
        """Idle pages of a run, but its last `surplus`, and of those above it."""
        num = -surplus if run.num_locks == 0 else 0
        while run.parent is not None:
            num += len(run.pages) if run.num_locks == 0 else 0
            run = run.parent
        return num

    def _lock(self, run: Run, above: Run) -> None:
        """Locks a run and those over it, up to `above`, which is left as it is."""
        while run is not above:
            if run.num_locks == 0:
                self._idle.pop(run, None)  # one that was made just now is not there yet
                self._num_idle_pages -= len(run.pages)
            run.num_locks += 1
            assert run.parent is not None
            run = run.parent

    def _evict(self, num_pages: int) -> None:
        if num_pages > 0:
            self._evicted_pages += num_pages
            self._drop_idle(num_pages)

    def _drop_idle(self, num_pages: int) -> None:
        """Frees idle pages: of the run that was used longest ago its last ones first."""
        while num_pages > 0:
            run, _ = self._idle.popitem(last=False)
            if len(run.pages) > num_pages:
                upper = self._split(run, len(run.pages) - num_pages)
                self._idle[upper] = None
                self._idle.move_to_end(upper, last=False)
            num_pages -= len(run.pages)
            self._num_idle_pages -= len(run.pages)
            self._free.give(run.pages)
            assert run.parent is not None
            del run.parent.children[self._first(run.tokens, 0)]
