"""The host tier: what it holds comes back as it was, events alone order its copies, and memory is taken when it is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from toy_platform import ToyRuntime

from polyrec.core.errors import ConfigError
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.backends.cpu.runtime import CpuRuntime
from polyrec.kvcache.host_tier import HostTier
from polyrec.kvcache.pool import KVPool
from polyrec.kvcache.prefix import PrefixCache

from .late_streams import LateRuntime
from .prefix_machine import SETTINGS, CacheMachine

PAGE = 4
CPU = torch.device("cpu")


class TierMachine(CacheMachine):
    """Evicted pages go to a host of any size."""

    num_host = None


class ToyMachine(TierMachine):
    def make_runtime(self, seed):
        return ToyRuntime()


class LateMachine(TierMachine):
    """The device works when it must, and its two streams in any order that events allow."""

    def make_runtime(self, seed):
        return LateRuntime(seed)

    def at_work(self):
        return self.device.at_work()


class DeviceMachine(TierMachine):
    def make_runtime(self, seed):
        return build_hardware_backend(HardwareConfig()).runtime


for machine in (TierMachine, ToyMachine, LateMachine):
    machine.TestCase.settings = SETTINGS
DeviceMachine.TestCase.settings = settings(SETTINGS, max_examples=30)
TestHost = TierMachine.TestCase
TestToy = ToyMachine.TestCase
TestLateStreams = LateMachine.TestCase


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda")
class TestDevice(DeviceMachine.TestCase):
    pass


class CountingRuntime(CpuRuntime):
    """What was pinned, in bytes."""

    def __init__(self):
        super().__init__()
        self.pinned = []

    def pin(self, tensor):
        self.pinned.append(tensor.nbytes)
        return tensor


def make_pool(num_pages, dtype=torch.float32, heads=2, head_dim=4, page_size=PAGE):
    """Random bits."""
    pool = KVPool(3, num_pages * page_size, heads, head_dim, dtype, CPU)
    for tensor in (pool.keys, pool.values):
        tensor.view(torch.uint8).random_(generator=torch.Generator().manual_seed(tensor.data_ptr() % 1000))
    return pool


def make_cache(num_pages, num_host, runtime=None, chunk_pages=100):
    pool = make_pool(num_pages)
    page_bytes = PAGE * pool.bytes_per_token
    tier = HostTier(pool, PAGE, runtime or CpuRuntime(), num_host * page_bytes, chunk_bytes=chunk_pages * page_bytes)
    return PrefixCache(num_pages, PAGE, tier), tier


def serve(cache, tokens):
    held = cache.admit(tokens)
    cache.keep(held, tokens)
    cache.release(held)
    return held.num_cached


def tokens_from(first, num):
    return np.arange(first, first + num)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "head_dim", "page_size"), [(2, 4, 4), (8, 128, 16), (1, 3, 1), (3, 5, 2)])
def test_every_bit_comes_back_in_any_order(dtype, heads, head_dim, page_size):
    pool = make_pool(40, dtype, heads, head_dim, page_size)
    page_bytes = page_size * pool.bytes_per_token
    tier = HostTier(
        pool, page_size, CpuRuntime(), 30 * page_bytes, chunk_bytes=4 * page_bytes, staging_bytes=3 * page_bytes
    )
    bits = [tensor.view(torch.uint8).clone() for tensor in (pool.keys, pool.values)]
    rng = np.random.default_rng(0)
    tier.reserve(30)
    places = rng.permutation(tier.allocate(30))[:17]
    pages, back = rng.permutation(40)[:17].astype(np.int32), rng.permutation(40)[:17].astype(np.int32)
    tier.store(pages, places)
    pool.keys.view(torch.uint8).zero_()
    pool.values.view(torch.uint8).zero_()
    tier.load(places, back)
    for tensor, before in zip((pool.keys, pool.values), bits, strict=True):
        after = tensor.view(torch.uint8).view(3, 40, page_size, -1)
        assert torch.equal(after[:, back], before.view(3, 40, page_size, -1)[:, pages])
        assert not after[:, np.setdiff1d(np.arange(40), back)].any()


def test_memory_is_pinned_in_chunks_when_it_is_needed():
    runtime = CountingRuntime()
    cache, tier = make_cache(21, num_host=50, runtime=runtime, chunk_pages=12)
    page_bytes = tier.page_bytes
    pinned = []
    for first in range(0, 10_000, 1000):
        serve(cache, tokens_from(first, 40))
        pinned.append(sum(runtime.pinned) // page_bytes)
    assert pinned == [0, 0, 12, 24, 36, 48, 50, 50, 50, 50]
    assert max(runtime.pinned) == 12 * page_bytes
    assert cache.num_on_host == 50


def test_a_full_host_gives_up_what_went_there_longest_ago():
    cache, _ = make_cache(11, num_host=15)
    visits = [tokens_from(first, 37) for first in (0, 1000, 2000, 3000)]
    for visit in visits:
        serve(cache, visit)
    # 9 whole pages each: those of the last one are on the device, of the 27 others 15 on the host.
    assert [cache.peek(visit) for visit in visits] == [0, 6 * PAGE, 36, 36]
    assert (cache.num_on_host, cache.num_evictable, cache.num_free) == (15, 9, 1)
    stats = cache.stats
    assert (stats.evicted_pages, stats.stored_pages, stats.dropped_pages) == (27, 27, 12)


def test_what_comes_back_counts_as_cached_and_leaves_the_host():
    cache, tier = make_cache(11, num_host=15)
    first, second = tokens_from(0, 37), tokens_from(1000, 37)
    for visit in (first, second, first):
        serve(cache, visit)
    assert cache.peek(first) == 36
    assert (cache.stats.hit_tokens, cache.stats.host_hit_tokens) == (36, 36)
    assert cache.num_on_host == tier.num_pages - tier.reserve(tier.num_pages)
    cache.clear()
    assert (cache.num_free, cache.num_on_host, tier.num_free) == (10, 0, 15)


def test_room_is_made_ahead_of_need():
    cache, _ = make_cache(31, num_host=100)
    visits = [tokens_from(first, 41) for first in (0, 1000, 2000)]
    for visit in visits[:2]:
        serve(cache, visit)
    cache.make_room(15)
    assert (cache.num_free, cache.num_evictable, cache.num_on_host) == (15, 15, 5)
    cache.make_room(8)  # is there
    assert (cache.num_free, cache.num_on_host) == (15, 5)
    serve(cache, visits[2])
    assert cache.stats.evicted_pages == 5
    assert [cache.peek(visit) for visit in visits] == [40, 40, 40]
    cache.make_room(1000)  # as far as there is something to evict
    assert (cache.num_free, cache.num_on_host) == (30, 30)


def test_what_is_more_than_the_host_holds_is_forgotten_oldest_first():
    cache, _ = make_cache(1200, num_host=70)
    for first in range(0, 10_000, 1000):
        serve(cache, tokens_from(first, 400))
    cache.make_room(1199)
    assert cache.num_free == 1199
    assert [cache.peek(tokens_from(first, 401)) for first in (7000, 8000, 9000)] == [0, 0, 280]


class TestOrder:
    """One step at a time, on streams that run late."""

    @pytest.fixture
    def device(self):
        return LateRuntime(seed=3)

    @pytest.fixture
    def pool(self):
        return KVPool(1, 8 * PAGE, 1, 2, torch.float32, CPU)

    def tier(self, pool, device):
        return HostTier(pool, PAGE, device, 8 * PAGE * pool.bytes_per_token)

    def test_nothing_is_waited_for_on_the_host(self, device, pool):
        tier = self.tier(pool, device)
        pages = np.arange(1, 5, dtype=np.int32)
        tier.reserve(4)
        places = tier.allocate(4)
        with device.at_work():
            pool.keys.fill_(7)
            tier.wait(tier.mark())
            tier.store(pages, places)
            pool.keys.zero_()
            tier.wait(tier.mark())
            tier.load(places, pages[::-1].copy())
            keys = pool.keys.clone()
        assert not pool.keys.any()  # no step has been taken
        device.synchronize()
        assert keys.view(8, -1)[:, 0].tolist() == [0, 7, 7, 7, 7, 0, 0, 0]

    @pytest.mark.parametrize("seed", range(20))
    def test_a_new_tier_waits_for_what_is_being_done_to_the_pool(self, pool, seed):
        device = LateRuntime(seed)
        with device.at_work():
            pool.keys.fill_(7)
        tier = self.tier(pool, device)
        tier.reserve(1)
        places, page = tier.allocate(1), np.array([1], np.int32)
        with device.at_work():
            tier.store(page, places)
            pool.keys.zero_()
            tier.wait(tier.mark())
            tier.load(places, page)
            keys = pool.keys.clone()
        device.synchronize()
        assert keys.view(8, -1)[:, 0].tolist() == [0, 7, 0, 0, 0, 0, 0, 0]

    def test_pages_leave_and_come_back_beside_the_batch_that_runs(self, device, pool):
        cache = PrefixCache(8, PAGE, self.tier(pool, device))
        first, second = tokens_from(0, 9), tokens_from(100, 9)
        for tokens in (first, second):
            held = cache.admit(tokens)
            with device.at_work():
                pool.keys.fill_(7)  # its batch
                cache.keep(held, tokens)
            if tokens is first:
                device.synchronize()  # its answer is out
                cache.release(held)
        with device.at_work():
            cache.make_room(6)
        assert cache.num_on_host == 2
        assert device.run_beside()
        with device.at_work():
            assert cache.admit(first).num_cached == 8
        assert device.run_beside()

    def test_pages_of_a_batch_that_may_still_run_wait_for_it(self, device, pool):
        cache = PrefixCache(8, PAGE, self.tier(pool, device))
        tokens = tokens_from(0, 9)
        held = cache.admit(tokens)
        with device.at_work():
            pool.keys.fill_(7)
            cache.keep(held, tokens)
            cache.release(held)
            cache.make_room(7)
        assert not device.run_beside()


@pytest.mark.parametrize("num_bytes", [0, 100, 1 << 60])
def test_a_size_that_cannot_be_is_refused(num_bytes):
    with pytest.raises(ConfigError) as caught:
        HostTier(make_pool(4), PAGE, CpuRuntime(), num_bytes)
    assert caught.value.code == "host_cache_size"
    assert f"{num_bytes:,} bytes" in caught.value.message
    assert "--host-cache-gib" in caught.value.remedy
