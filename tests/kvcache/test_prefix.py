"""The prefix cache against a model of it that has no tree, and what a random sequence of prompts would show too seldom."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from polyrec.kvcache.prefix import PrefixCache

from .prefix_machine import SETTINGS, CacheMachine

PAGE = 4


class UncachedMachine(CacheMachine):
    """No page is found again."""

    enabled = False


CacheMachine.TestCase.settings = UncachedMachine.TestCase.settings = SETTINGS
TestAgainstModel = CacheMachine.TestCase
TestUncachedAgainstModel = UncachedMachine.TestCase


def prompt(*parts):
    """Tokens of (first, number) stretches, one after another."""
    return np.concatenate([np.arange(first, first + num) for first, num in parts])


def serve(cache, tokens):
    """Admitted, kept and released; how many of its tokens were cached."""
    held = cache.admit(tokens)
    cache.keep(held, tokens)
    cache.release(held)
    return held.num_cached


def state(cache, *prompts):
    return cache.num_free, cache.num_evictable, cache.num_used, cache.stats, [cache.peek(each) for each in prompts]


def test_a_history_that_grew_pays_for_what_is_new():
    cache = PrefixCache(100, PAGE)
    visits = [prompt((0, num)) for num in (30, 33, 60, 60, 61, 5)]
    assert [serve(cache, visit) for visit in visits] == [0, 28, 32, 56, 60, 4]
    assert cache.num_evictable == 15
    assert cache.stats.hit_tokens / cache.stats.prompt_tokens == (28 + 32 + 56 + 60 + 4) / 249


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
def test_the_last_token_is_always_computed(length):
    cache = PrefixCache(20, PAGE)
    tokens = prompt((0, length))
    assert [serve(cache, tokens) for _ in range(3)] == [0, *[(length - 1) // PAGE * PAGE] * 2]
    assert cache.num_pages_needed(length) == -(-length // PAGE)


def test_prompts_that_part_ways_within_a_run_share_what_is_before():
    cache = PrefixCache(100, PAGE)
    first, second = prompt((0, 40)), prompt((0, 22), (500, 18))
    serve(cache, first)
    held = cache.admit(second)
    assert held.num_cached == 20
    cache.keep(held, second)
    assert cache.peek(prompt((0, 22), (500, 19))) == 40
    assert cache.peek(prompt((0, 41))) == 40
    other = cache.admit(first)
    assert held.pages[:5].tolist() == other.pages[:5].tolist()
    assert not set(held.pages[5:]) & set(other.pages[5:])


def test_two_of_one_batch_with_the_same_new_prefix_both_compute_it():
    cache = PrefixCache(100, PAGE)
    first, second = prompt((0, 40)), prompt((0, 40), (100, 8))
    held = [cache.admit(each) for each in (first, second)]
    assert [each.num_cached for each in held] == [0, 0]
    assert not set(held[0].pages) & set(held[1].pages)
    for each, tokens in zip(held, (first, second), strict=True):
        cache.keep(each, tokens)
    cache.release(held[0])
    assert cache.num_evictable == 0  # what the second one added is below what the first one had
    cache.release(held[1])
    assert (cache.num_free, cache.num_evictable) == (99 - 12, 12)
    assert cache.peek(prompt((0, 40), (100, 9))) == 48


def test_an_admission_that_fails_changes_nothing():
    cache = PrefixCache(21, PAGE)
    old, older = prompt((0, 24)), prompt((100, 24))
    serve(cache, older)
    serve(cache, old)
    running = cache.admit(prompt((200, 20)))
    known = old, older, prompt((0, 14), (300, 8))
    before = state(cache, *known)
    # Both would split a run; the pages that they share cannot be evicted for them.
    assert cache.admit(prompt((0, 14), (400, 50))) is None
    assert cache.admit(prompt((100, 10), (400, 54))) is None
    assert state(cache, *known) == before
    assert cache.admit(prompt((300, 15 * PAGE))) is not None  # all that is free or can be evicted
    assert state(cache, *known)[:3] == (0, 0, 20)
    cache.release(running)


def test_what_was_used_longest_ago_goes_first_from_its_end():
    cache = PrefixCache(32, PAGE)
    first, second, third = visits = [prompt((start, 41)) for start in (0, 100, 200)]
    for each in (first, second, third, first):
        serve(cache, each)
    serve(cache, prompt((900, 12)))
    assert [cache.peek(each) for each in visits] == [40, 32, 40]
    serve(cache, prompt((800, 40)))
    assert [cache.peek(each) for each in visits] == [40, 0, 32]
    assert cache.stats.evicted_pages == 12


def test_a_prompt_in_use_keeps_what_is_above_it_too():
    cache = PrefixCache(13, PAGE)
    serve(cache, prompt((0, 16)))
    running = cache.admit(prompt((0, 16), (50, 4)))
    assert (running.num_cached, cache.num_evictable, cache.num_used) == (16, 0, 5)
    assert cache.admit(prompt((300, 8 * PAGE))) is None
    assert cache.admit(prompt((300, 7 * PAGE))) is not None
    assert cache.peek(prompt((0, 17))) == 16


def test_a_launch_that_failed_leaves_no_page_behind_and_nothing_to_find():
    cache = PrefixCache(20, PAGE)
    tokens = prompt((0, 30))
    cache.release(cache.admit(tokens))
    assert (cache.num_free, cache.peek(tokens)) == (19, 0)


def test_without_a_tier_pages_stay_while_they_can():
    cache = PrefixCache(20, PAGE)
    serve(cache, prompt((0, 60)))
    cache.make_room(19)
    assert cache.peek(prompt((0, 61))) == 60


def test_clearing_leaves_what_is_in_use():
    cache = PrefixCache(40, PAGE)
    first, second = prompt((0, 40)), prompt((0, 20), (100, 20))
    serve(cache, first)
    held = cache.admit(second)
    cache.keep(held, second)
    cache.clear()
    assert cache.peek(first) == 20
    assert (cache.num_evictable, cache.num_used) == (0, 10)
    cache.release(held)
    cache.clear()
    assert (cache.num_free, cache.peek(second)) == (39, 0)


def test_tokens_of_any_integer_type_and_layout_are_the_same_prompt():
    cache = PrefixCache(40, PAGE)
    tokens = prompt((1000, 21))
    serve(cache, tokens)
    for dtype in (np.int32, np.uint32, np.int64, np.uint16):
        assert cache.peek(tokens.astype(dtype)) == 20
        assert cache.peek(np.repeat(tokens.astype(dtype), 2)[::2]) == 20


def test_work_does_not_grow_with_the_pages_that_are_kept():
    """Counted in calls, not in time: a cache of 100 times as many prompts takes as many steps for one more."""

    def num_calls(num_prompts):
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        cache = PrefixCache(num_prompts * 5 + 1, PAGE)
        for index in range(num_prompts + 10):
            serve(cache, prompt((1000 * index, 20)))
        sys.setprofile(count)
        try:
            serve(cache, prompt((1000 * num_prompts, 20), (0, 4)))
            serve(cache, prompt((5, 20)))
        finally:
            sys.setprofile(None)
        return calls

    assert num_calls(1000) <= num_calls(10) + 5


def test_it_loads_no_torch():
    code = "import sys, polyrec.kvcache.prefix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
