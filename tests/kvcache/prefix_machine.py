"""Random prompts come, are computed, kept, answered and forgotten; the cache does what the model does, and a token's keys and
values are those of the token and all before it, wherever they have been in between."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from polyrec.hardware.backends.cpu.runtime import CpuRuntime
from polyrec.hardware.base.runtime import Event, Runtime
from polyrec.kvcache.host_tier import HostTier
from polyrec.kvcache.pool import KVPool
from polyrec.kvcache.prefix import Held, PrefixCache

from .prefix_model import PrefixModel, Ticket

NUM_LAYERS = 2
HEAD_DIM = 2
SETTINGS = settings(
    max_examples=100, stateful_step_count=50, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
# Few customers, of whom two began alike: what they had is met again, and parts ways within a page and at its end.
HISTORIES = ([0, 1] * 12, [0, 1] * 3 + [1, 1, 0] * 6, [1, 0, 0] * 8)
PROMPTS = st.builds(
    lambda customer, length, tail: HISTORIES[customer][:length] + tail,
    st.integers(0, len(HISTORIES) - 1),
    st.integers(1, 24),
    st.lists(st.integers(0, 1), max_size=3),
)


@dataclass
class Launched:
    """One admitted prompt of a batch. read: what a kernel found in the prompt's slots, complete once the event is passed."""

    prompt: list[int]
    held: Held
    ticket: Ticket
    read: torch.Tensor
    done: Event


class CacheMachine(RuleBasedStateMachine):
    """num_host: pages that the host has room for; None: any. make_runtime: the device that the pool is on."""

    num_host: int | None = 0
    enabled = True
    page_size = 2

    def make_runtime(self, seed: int) -> Runtime:
        return CpuRuntime()

    def at_work(self) -> AbstractContextManager[Any]:
        """Operations inside are the device's."""
        return nullcontext()

    @initialize(num_pages=st.integers(4, 20), num_host=st.integers(1, 20), seed=st.integers(0, 1 << 20))
    def build(self, num_pages: int, num_host: int, seed: int) -> None:
        self.device = self.make_runtime(seed)
        self.pool = KVPool(NUM_LAYERS, num_pages * self.page_size, 1, HEAD_DIM, torch.float32, self.device.device)
        num_host = num_host if self.num_host is None else self.num_host
        page_bytes = self.page_size * self.pool.bytes_per_token
        self.tier = num_host and HostTier(
            self.pool,
            self.page_size,
            self.device,
            num_host * page_bytes + page_bytes // 2,
            chunk_bytes=3 * page_bytes,
            staging_bytes=2 * page_bytes,
        )
        self.cache = PrefixCache(num_pages, self.page_size, self.tier or None, self.enabled)
        self.model = PrefixModel(num_pages - 1, self.page_size, num_host, self.enabled)
        self.num_pages = num_pages
        self.numbers: dict[tuple[int, ...], int] = {}
        self.running: list[Launched] = []

    @rule(batch=st.lists(PROMPTS, min_size=1, max_size=3))
    def launch(self, batch: list[list[int]]) -> None:
        admitted = [self.admit(prompt) for prompt in batch]
        launched = [self.compute(prompt, *each) for prompt, each in zip(batch, admitted, strict=True) if each]
        for each in launched:
            self.cache.keep(each.held, np.array(each.prompt))
            self.model.keep(each.ticket)
        self.running += launched

    @rule(batch=st.lists(PROMPTS, min_size=1, max_size=2))
    def serve(self, batch: list[list[int]]) -> None:
        num_before = len(self.running)
        self.launch(batch)
        while len(self.running) > num_before:
            self.finish(num_before)

    @rule(prompt=PROMPTS)
    def launch_that_fails(self, prompt: list[int]) -> None:
        """Part of the work was queued, nothing of it is kept, and it may still run."""
        admitted = self.admit(prompt)
        if admitted:
            held, ticket = admitted
            self.write(held, [-1] * len(prompt))
            self.cache.release(held)
            self.model.release(ticket)

    @rule(index=st.integers(0, 100))
    def finish(self, index: int) -> None:
        if self.running:
            each = self.running.pop(index % len(self.running))
            each.done.synchronize()
            assert torch.equal(each.read.cpu(), contents(self.numbers_of(each.prompt)))
            self.cache.release(each.held)
            self.model.release(each.ticket)

    @rule(num_pages=st.integers(0, 24))
    def make_room(self, num_pages: int) -> None:
        with self.at_work():
            self.cache.make_room(num_pages)
        self.model.make_room(num_pages)

    @rule(times_ten=st.integers(0, 9))
    def clear(self, times_ten: int = 0) -> None:
        """Now and then."""
        if times_ten:
            return
        self.cache.clear()
        self.model.clear()

    @invariant()
    def counts_are_the_models(self) -> None:
        cache, model = self.cache, self.model
        on_host = len(model.unused(on_host=True))
        assert (cache.num_free, cache.num_evictable, cache.num_on_host) == (
            model.num_free,
            len(model.unused(on_host=False)),
            on_host,
        )
        assert cache.num_free + cache.num_evictable + cache.num_used == self.num_pages - 1
        stats = cache.stats
        assert stats.hit_tokens == model.hit_pages * self.page_size
        assert stats.host_hit_tokens == model.host_hit_pages * self.page_size
        assert stats.evicted_pages == model.evicted_pages
        for prompt in HISTORIES:
            assert cache.peek(np.array(prompt)) == len(model.cached(prompt)) * self.page_size

    @invariant()
    def no_page_is_in_two_hands(self) -> None:
        owner: dict[int, tuple[int, ...]] = {}
        for each in self.running:
            for place, page in enumerate(each.held.pages.tolist()):
                assert 0 < page < self.num_pages
                whole = (place + 1) * self.page_size <= len(each.prompt)
                content = tuple(each.prompt[: (place + 1) * self.page_size]) if whole else (-id(each),)
                assert owner.setdefault(page, content) == content
        assert len(owner) <= self.cache.num_used

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            while self.running:
                self.finish(0)
            self.clear()
            assert self.cache.num_free == self.num_pages - 1
            if self.tier:
                assert self.tier.reserve(self.tier.num_pages) == self.tier.num_pages

    def admit(self, prompt: list[int]) -> tuple[Held, Ticket] | None:
        with self.at_work():
            held = self.cache.admit(np.array(prompt))
        ticket = self.model.admit(prompt)
        assert (held is None) == (ticket is None)
        if held is None or ticket is None:
            return None
        assert held.num_cached == ticket.num_cached <= len(prompt) - 1
        assert held.pages.dtype == np.int32
        assert len(held.pages) == self.cache.num_pages_needed(len(prompt))
        return held, ticket

    def compute(self, prompt: list[int], held: Held, ticket: Ticket) -> Launched:
        """What a prefill does: writes what is not cached, and reads all."""
        self.write(held, self.numbers_of(prompt))
        slots = self.slots(held, len(prompt))
        with self.at_work():
            read = torch.stack([self.pool.keys[:, slots], self.pool.values[:, slots]])
        done = self.device.event()
        done.record(self.device.current_stream())
        return Launched(prompt, held, ticket, read, done)

    def write(self, held: Held, numbers: list[int]) -> None:
        slots = self.slots(held, len(numbers))[held.num_cached :]
        keys, values = self.device.to_device(contents(numbers[held.num_cached :]))
        with self.at_work():
            self.pool.keys[:, slots] = keys
            self.pool.values[:, slots] = values

    def slots(self, held: Held, num_tokens: int) -> torch.Tensor:
        token = np.arange(num_tokens)
        slots = held.pages.astype(np.int64)[token // self.page_size] * self.page_size + token % self.page_size
        return self.device.to_device(torch.from_numpy(slots))

    def numbers_of(self, prompt: list[int]) -> list[int]:
        """One for each token, another one wherever the token or something before it is another."""
        ends = range(1, len(prompt) + 1)
        return [self.numbers.setdefault(tuple(prompt[:end]), len(self.numbers)) for end in ends]


def contents(numbers: list[int]) -> torch.Tensor:
    """Keys and values of tokens in all layers, [2, layers, tokens, 1, D]: no two rows are alike."""
    number = torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1, 1)
    place = torch.arange(2 * NUM_LAYERS * HEAD_DIM).view(2, NUM_LAYERS, 1, 1, HEAD_DIM)
    return number * place.numel() + place
