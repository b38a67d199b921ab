"""What a prefix cache does, page by page and without a tree: slow, and plainly right. A page is known by all tokens up to its
end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

Page = tuple[int, ...]


@dataclass
class Kept:
    """used: the moment since which nobody uses it; on the host: when it went there. locks: prompts that use it."""

    used: int = 0
    locks: int = 0
    on_host: bool = False


@dataclass
class Ticket:
    """An admitted prompt: the kept pages that it uses, and how many pages are its alone."""

    prompt: list[int]
    num_cached: int
    uses: list[Page]
    num_own: int


@dataclass
class PrefixModel:
    num_free: int
    page_size: int
    num_host: int = 0
    enabled: bool = True
    kept: dict[Page, Kept] = field(default_factory=dict)
    moments: itertools.count = field(default_factory=itertools.count)
    hit_pages: int = 0
    host_hit_pages: int = 0
    evicted_pages: int = 0

    def pages(self, prompt: list[int]) -> list[Page]:
        """The whole pages of a prompt."""
        return [tuple(prompt[:end]) for end in range(self.page_size, len(prompt) + 1, self.page_size)]

    def cached(self, prompt: list[int]) -> list[Page]:
        """Those of all but the last token that are kept, from the first on."""
        return list(itertools.takewhile(self.kept.__contains__, self.pages(prompt[:-1])))

    def unused(self, on_host: bool) -> list[Page]:
        """Least recently used first."""
        found = [page for page, kept in self.kept.items() if kept.on_host == on_host and kept.locks == 0]
        return sorted(found, key=lambda page: self.kept[page].used)

    def admit(self, prompt: list[int]) -> Ticket | None:
        cached = self.cached(prompt)
        back = [page for page in cached if self.kept[page].on_host]
        needed = -(-len(prompt) // self.page_size) - len(cached) + len(back)
        evictable = [page for page in self.unused(on_host=False) if page not in cached]
        if needed > self.num_free + len(evictable):
            return None
        for page in cached:
            self.kept[page].locks += 1
        while self.num_free < needed:
            self.evict()
        self.num_free -= needed
        for page in back:
            self.kept[page].on_host = False
        self.hit_pages += len(cached)
        self.host_hit_pages += len(back)
        return Ticket(prompt, len(cached) * self.page_size, cached, needed - len(back))

    def keep(self, ticket: Ticket) -> None:
        if not self.enabled:
            return
        for page in self.pages(ticket.prompt)[len(ticket.uses) :]:
            kept = self.kept.get(page)
            if kept is None or kept.on_host:
                ticket.num_own -= 1  # it is everyone's now
                self.kept[page] = Kept()
            self.kept[page].locks += 1
            ticket.uses.append(page)

    def release(self, ticket: Ticket) -> None:
        for page in reversed(ticket.uses):
            self.kept[page].locks -= 1
            self.kept[page].used = next(self.moments)
        self.num_free += ticket.num_own

    def evict(self) -> None:
        page = self.unused(on_host=False)[0]
        assert not any(
            longer[: len(page)] == page and not self.kept[longer].on_host for longer in self.kept if longer != page
        )
        self.num_free += 1
        self.evicted_pages += 1
        there = [kept for kept in self.kept.values() if kept.on_host]
        if len(there) == self.num_host:
            oldest = [*self.unused(on_host=True), page][0]
            del self.kept[oldest]
        if page in self.kept:
            self.kept[page] = Kept(next(self.moments), on_host=True)

    def make_room(self, num_pages: int) -> None:
        if self.num_host:
            for _ in range(min(num_pages - self.num_free, len(self.unused(on_host=False)))):
                self.evict()

    def clear(self) -> None:
        self.num_free += len(self.unused(on_host=False))
        self.kept = {page: kept for page, kept in self.kept.items() if kept.locks}
