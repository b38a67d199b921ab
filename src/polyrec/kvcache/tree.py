"""The radix tree that finds a prompt's beginning among those that are kept: whole pages only, keyed by their tokens.

A run is a stretch of pages that always follow each other; a tree of runs has as many nodes as prompts part ways, where one of
pages would have one for every 16 tokens. Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

TOKEN = np.dtype(np.int32)  # of keys
NO_PAGES = np.empty(0, np.int32)


class Run:
    """tokens: of its pages, as bytes. pages: int32 [n], of the device, or of the host's memory where on_host; what is above a
    run on the device is there too. children: by the tokens of their first page. num_locks: prompts that use it."""

    __slots__ = ("children", "num_locks", "on_host", "pages", "parent", "tokens")

    def __init__(self, parent: Run | None, tokens: bytes, pages: np.ndarray) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.on_host = False
        self.children: dict[bytes, Run] = {}
        self.num_locks = 0


class Match(NamedTuple):
    """run: the last run that a prompt shares. num_pages: that it shares in all. num_extra: pages of `run` behind those."""

    run: Run
    num_pages: int
    num_extra: int


class Tree:
    """Keys are prompts as bytes; `start` and `end` count pages of a key."""

    def __init__(self, page_size: int) -> None:
        self.root = Run(None, b"", NO_PAGES)
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN.itemsize

    def key(self, prompt: np.ndarray) -> bytes:
        return prompt.astype(TOKEN).tobytes()

    def match(self, key: bytes, end: int) -> Match:
        """How much of the key's first `end` pages there is."""
        run, start = self.root, 0
        while start < end:
            child = self.child(run, key, start)
            if child is None:
                break
            num_same = self.num_same(child, key, start, end)
            run, start = child, start + num_same
            if num_same < len(child.pages):
                return Match(run, start, len(child.pages) - num_same)
        return Match(run, start, 0)

    def child(self, run: Run, key: bytes, start: int) -> Run | None:
        """The run below that goes on with the key's page `start`."""
        return run.children.get(self._page_of(key, start))

    def num_same(self, run: Run, key: bytes, start: int, end: int) -> int:
        """How many pages of the run are those of the key from `start` to `end`."""
        num, offset = min(len(run.pages), end - start), start * self._page_bytes
        if num == len(run.pages) and key.startswith(run.tokens, offset):
            return num
        count = num * self._page_size
        differs = np.frombuffer(run.tokens, TOKEN, count) != np.frombuffer(key, TOKEN, count, offset)
        first = int(differs.argmax())
        return first // self._page_size if differs[first] else num

    def add(self, parent: Run, key: bytes, start: int, pages: np.ndarray) -> Run:
        """A new run below `parent`, of the key from page `start` on. pages: int32 [n], n ≥ 1, on the device."""
        run = Run(parent, key[start * self._page_bytes : (start + len(pages)) * self._page_bytes], pages)
        parent.children[self._page_of(key, start)] = run
        return run

    def split(self, run: Run, num_upper: int) -> Run:
        """Cuts a run in two; returns the upper, new one. `run` stays the lower one: whoever locked it last locked it whole."""
        assert run.parent is not None
        assert 0 < num_upper < len(run.pages)
        cut = num_upper * self._page_bytes
        upper = Run(run.parent, run.tokens[:cut], run.pages[:num_upper])
        upper.num_locks, upper.on_host = run.num_locks, run.on_host
        run.parent.children[self._page_of(run.tokens, 0)] = upper
        run.parent, run.tokens, run.pages = upper, run.tokens[cut:], run.pages[num_upper:]
        upper.children[self._page_of(run.tokens, 0)] = run
        return upper

    def remove(self, run: Run) -> None:
        """Forgets a run that has none below it."""
        assert run.parent is not None
        assert not run.children
        del run.parent.children[self._page_of(run.tokens, 0)]

    def _page_of(self, key: bytes, page: int) -> bytes:
        return key[page * self._page_bytes : (page + 1) * self._page_bytes]


class UnusedRuns:
    """Runs that nobody uses, of the device or of the host: least recently used first, each before the one above it, so that the
    first has none of them below it. num_pages: of all of them."""

    def __init__(self) -> None:
        self._order: OrderedDict[Run, None] = OrderedDict()
        self.num_pages = 0

    def add(self, run: Run) -> None:
        """As the one used last. A run comes before the one above it when both are added."""
        self._order[run] = None
        self.num_pages += len(run.pages)

    def remove(self, run: Run) -> None:
        """A run, or the upper part of one, which came by being split."""
        self._order.pop(run, None)
        self.num_pages -= len(run.pages)

    def pop(self, num_pages: int, tree: Tree) -> list[Run]:
        """The first runs, cut so that they have exactly that many pages; those that go are a run's last ones."""
        runs = []
        self.num_pages -= num_pages
        while num_pages > 0:
            run, _ = self._order.popitem(last=False)
            if len(run.pages) > num_pages:
                upper = tree.split(run, len(run.pages) - num_pages)
                self._order[upper] = None
                self._order.move_to_end(upper, last=False)
            num_pages -= len(run.pages)
            runs.append(run)
        return runs
