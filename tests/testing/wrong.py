"""Attention backends, graphs and runtimes with one fault each, right otherwise: what the conformance suite must find."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import torch

from polyrec.attention.sdpa import PackedPlan, SdpaAttention, SdpaSearch, packed_mask, prefix_mask
from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.cpu.graph import CpuCapturedGraph, CpuGraph
from polyrec.hardware.backends.cpu.runtime import CpuRuntime, HostEvent
from polyrec.hardware.base.attention import AttentionPlan, AttentionSupport


class Changed(AttentionPlan):
    """A plan whose run goes through a function of (plan's run, layer, query, key, value)."""

    def __init__(self, plan, run):
        self._plan = plan
        self._run = run

    def run(self, layer, query, key, value):
        return self._run(self._plan.run, layer, query, key, value)


class SeesTheNext(SdpaAttention):
    """The causal mask is off by one."""

    def packed(self, layout, cache=None):
        plan = PackedPlan(layout, cache, self.ops.kv)
        column = torch.arange(layout.padded.shape[1])
        late = column[:, None] + 1 < column
        plan._mask = torch.zeros(late.shape).masked_fill(late, float("-inf"))[None, None]
        return plan


class MissesItself(SdpaAttention):
    """The mask is off by one the other way; the first token sees itself all the same."""

    def packed(self, layout, cache=None):
        plan = PackedPlan(layout, cache, self.ops.kv)
        column = torch.arange(layout.padded.shape[1])
        late = (column[:, None] <= column) & (column[:, None] > 0) | (column[:, None] < column)
        plan._mask = torch.zeros(late.shape).masked_fill(late, float("-inf"))[None, None]
        return plan


class SeesNeighbours(SdpaAttention):
    """All sequences are one."""

    def packed(self, layout, cache=None):
        one = torch.tensor([layout.num_tokens])
        joined = dataclasses.replace(layout, lengths=one, longest=layout.num_tokens, host_lengths=one)
        return super().packed(joined, cache)


class SeesOtherBranches(SdpaAttention):
    """A branch sees the branches before it."""

    def packed(self, layout, cache=None):
        return super().packed(dataclasses.replace(layout, branch=None), cache)


class WindowByPlace(SdpaAttention):
    """A window counts packed places, where a branch's tokens follow its prompt's."""

    def packed(self, layout, cache=None):
        plan = PackedPlan(layout, cache, self.ops.kv)
        column = torch.arange(layout.padded.shape[1])
        far = column[:, None] - column >= self.needs.sliding_window
        plan._mask = packed_mask(layout, None).masked_fill(far, float("-inf"))
        return plan


class OtherNeeds(SdpaAttention):
    """Built for other needs than the model's."""

    changed: dict = {}  # noqa: RUF012

    def __init__(self, needs, ops):
        super().__init__(dataclasses.replace(needs, **self.changed), ops)


class WideWindow(OtherNeeds):
    """A query sees one token too many."""

    def __init__(self, needs, ops):
        super().__init__(dataclasses.replace(needs, sliding_window=needs.sliding_window + 1), ops)


class NoWindow(OtherNeeds):
    """The window is claimed and ignored."""

    changed = {"sliding_window": None}  # noqa: RUF012


class NoCap(OtherNeeds):
    """The soft cap is claimed and ignored."""

    changed = {"soft_cap": None}  # noqa: RUF012


class StoresTwice(SdpaAttention):
    """Keys and values go to the cache twice."""

    def packed(self, layout, cache=None):
        def run(plan_run, layer, query, key, value):
            if cache is not None:
                self.ops.kv.write(key, value, *cache.layer(layer), torch.arange(len(key)))
            return plan_run(layer, query, key, value)

        return Changed(super().packed(layout, cache), run)


class StoresElsewhereToo(SdpaAttention):
    """A slot that is not the batch's is written, directly, without kv.write."""

    def packed(self, layout, cache=None):
        def run(plan_run, layer, query, key, value):
            if cache is not None:
                cache.layer(layer)[0].data[len(key)] = 0
            return plan_run(layer, query, key, value)

        return Changed(super().packed(layout, cache), run)


class StoresInOneLayer(SdpaAttention):
    """Every layer's keys and values go to layer 0."""

    def packed(self, layout, cache=None):
        first = None if cache is None else type("First", (), {"layer": lambda self, layer: cache.layer(0)})()
        return super().packed(layout, first)


class StoresNothing(SdpaAttention):
    """The cache stays as it was."""

    def packed(self, layout, cache=None):
        return super().packed(layout)


class NoKeyGradient(SdpaAttention):
    """Keys get no gradient."""

    def packed(self, layout, cache=None):
        return Changed(super().packed(layout, cache), lambda run, layer, q, k, v: run(layer, q, k.detach(), v))


class OwnRows(SdpaAttention):
    """Ancestors are ignored: a beam takes what stood in its own row."""

    def search(self, layout, cache, *, width, num_kept):
        search = super().search(layout, cache, width=width, num_kept=num_kept)
        step = search.step

        def wrong(ancestors, *, last):
            own = torch.arange(len(ancestors))[:, None].expand_as(ancestors).clamp_max(2 * len(layout.lengths) - 1)
            return step(own, last=last)

        search.step = wrong
        return search


class NewestAncestorOnly(SdpaAttention):
    """A beam takes all its tokens from the row of its newest ancestor."""

    def search(self, layout, cache, *, width, num_kept):
        search = super().search(layout, cache, width=width, num_kept=num_kept)
        step = search.step
        first = 2 * len(layout.lengths) - 1
        search.step = lambda ancestors, *, last: step(
            ancestors[:, -1:].expand_as(ancestors).clamp_max(first), last=last
        )
        return search


class ShortPrompt(SdpaAttention):
    """Beams miss the last token of longer prompts."""

    def search(self, layout, cache, *, width, num_kept):
        shorter = dataclasses.replace(layout, lengths=(layout.lengths - 1).clamp_min(1))
        return super().search(shorter, cache, width=width, num_kept=num_kept)


def with_table(layout, **changes):
    """The layout with another page table, where it has one."""
    return (
        layout
        if layout.table is None
        else dataclasses.replace(layout, table=dataclasses.replace(layout.table, **changes))
    )


class LastRowsStandTooEarly(SdpaAttention):
    """Of sequences whose lengths the device alone knows, as those of last rows, all stand one token before their place."""

    def packed(self, layout, cache=None):
        if layout.host_lengths is None and layout.cached is not None:
            table = dataclasses.replace(layout.table, cached=(layout.cached - 1).clamp_min(0))
            layout = dataclasses.replace(layout, table=table)
        return super().packed(layout, cache)


class WritesLastRows(SdpaAttention):
    """A plan of last rows writes keys and values that are there."""

    def packed(self, layout, cache=None):
        plan = super().packed(layout, cache)
        run_written = plan.run_written

        def again(layer, query, key, value):
            self.ops.kv.write(key, value, *plan.target(layer))
            return run_written(layer, query, key, value)

        if layout.host_lengths is None and layout.cached is not None:
            plan.run_written = again
        return plan


class IgnoresCached(SdpaAttention):
    """What is left of a prompt is taken for the whole prompt."""

    def packed(self, layout, cache=None):
        return super().packed(with_table(layout, cached=None), cache)


class ForgetsCachedInTheSearch(SdpaAttention):
    """Beams see only as many of a prompt's tokens as the prefill ran."""

    def search(self, layout, cache, *, width, num_kept):
        return super().search(with_table(layout, cached=None), cache, width=width, num_kept=num_kept)


class PositionWithoutPrefix(SdpaAttention):
    """A query's position counts from the first token that is not cached, so it misses the end of what it may see."""

    def packed(self, layout, cache=None):
        plan = super().packed(layout, cache)
        if layout.cached is not None:
            plan._mask = prefix_mask(layout, torch.zeros_like(layout.cached), self.needs.sliding_window)
        return plan


class OneTokenTooFar(SdpaAttention):
    """A query after a cached prefix sees the next token too."""

    def packed(self, layout, cache=None):
        plan = super().packed(layout, cache)
        if layout.cached is not None:
            plan._mask = prefix_mask(layout, layout.cached + 1, self.needs.sliding_window)
        return plan


class StoresOverThePrefix(SdpaAttention):
    """Keys and values go where a prompt without cached tokens would have them; the rest is right."""

    def packed(self, layout, cache=None):
        plan = super().packed(layout, cache)
        plan._slots = with_table(layout, cached=None).slots
        return plan


class StoresThePrefixAgain(SdpaAttention):
    """What is cached of a prompt is written once more, as the zeros that are no longer known of it."""

    def packed(self, layout, cache=None):
        def run(plan_run, layer, query, key, value):
            result = plan_run(layer, query, key, value)
            if layout.cached is not None:
                rows = layout.prompt_slots[:, 0][layout.cached > 0]
                cache.layer(layer)[0].data[rows] = 0
            return result

        return Changed(super().packed(layout, cache), run)


class IgnoresTheTable(SdpaAttention):
    """Keys and values go to slots 0…T − 1, where the search finds them again."""

    def packed(self, layout, cache=None):
        return super().packed(dataclasses.replace(layout, table=None), cache)

    def search(self, layout, cache, *, width, num_kept):
        return super().search(dataclasses.replace(layout, table=None), cache, width=width, num_kept=num_kept)


class IgnoresTheTableInTheSearch(SdpaAttention):
    """Beams read slots 0…T − 1, wherever the prompts are."""

    def search(self, layout, cache, *, width, num_kept):
        return super().search(dataclasses.replace(layout, table=None), cache, width=width, num_kept=num_kept)


class ReadsPageZero(SdpaAttention):
    """The last page of every prompt is taken for page 0."""

    changed = staticmethod(lambda pages, last: torch.where(torch.arange(pages.shape[1]) == last, 0, pages))

    def _with_other_pages(self, layout):
        if layout.table is None:
            return layout
        last = (layout.prompt_lengths - 1)[:, None] // layout.table.page_size
        return with_table(layout, pages=self.changed(layout.table.pages, last))

    def packed(self, layout, cache=None):
        plan = super().packed(layout, cache)
        if layout.cached is not None:
            plan._prompt_slots = self._with_other_pages(layout).prompt_slots
        return plan

    def search(self, layout, cache, *, width, num_kept):
        return super().search(self._with_other_pages(layout), cache, width=width, num_kept=num_kept)


class OneRowForAll(ReadsPageZero):
    """All prompts are read through the first one's row of the table."""

    changed = staticmethod(lambda pages, last: pages[:1].expand_as(pages))


class OnePageTooFar(ReadsPageZero):
    """Each page is taken for the one after it in the table."""

    changed = staticmethod(lambda pages, last: pages.roll(-1, 1))


class OnePageTooLow(ReadsPageZero):
    """Each page number is off by one."""

    changed = staticmethod(lambda pages, last: (pages - 1).clamp_min(0))


class OtherPageSize(SdpaAttention):
    """Pages are taken to be half as large."""

    def search(self, layout, cache, *, width, num_kept):
        size = None if layout.table is None else layout.table.page_size // 2
        wider = None if layout.table is None else torch.cat((layout.table.pages, layout.table.pages), 1)
        return super().search(with_table(layout, page_size=size, pages=wider), cache, width=width, num_kept=num_kept)


class SmallHeadsOnly(SdpaAttention):
    """What comes after a head's first 64 numbers is left out of the scores."""

    support = AttentionSupport(head_dims=(16, 128))

    def packed(self, layout, cache=None):
        def run(plan_run, layer, query, key, value):
            seen = torch.arange(query.shape[-1]) < 64
            return plan_run(layer, query * seen, key, value)

        return Changed(super().packed(layout, cache), run)


class SeesPadding(SdpaAttention):
    """Beams see the padding of prompts shorter than the longest."""

    def search(self, layout, cache, *, width, num_kept):
        search = super().search(layout, cache, width=width, num_kept=num_kept)
        return SdpaSearch(search.prompt, torch.full_like(layout.lengths, layout.longest), search.suffix)


class KeepsTheFirstBatch(SdpaAttention):
    """The prompts of the first batch serve all batches."""

    kept = None

    def search(self, layout, cache, *, width, num_kept):
        search = super().search(layout, cache, width=width, num_kept=num_kept)
        self.kept = self.kept or search.prompt
        stale = [tuple(part[: len(layout.lengths), :, : layout.padded.shape[1]] for part in pair) for pair in self.kept]
        return SdpaSearch(stale, layout.lengths, search.suffix)


class WritesThePromptsCache(SdpaAttention):
    """A beam's pass keeps its keys in the prompts' cache, behind the prompts."""

    def search(self, layout, cache, *, width, num_kept):
        search = super().search(layout, cache, width=width, num_kept=num_kept)
        step = search.step

        def run(plan_run, layer, query, key, value):
            cache.layer(layer)[0][-1] = key[0]
            return plan_run(layer, query, key, value)

        search.step = lambda ancestors, *, last: Changed(step(ancestors, last=last), run)
        return search


class LastPassStores(SdpaAttention):
    """The last pass stores its tokens, for which there is no place."""

    def search(self, layout, cache, *, width, num_kept):
        search = super().search(layout, cache, width=width, num_kept=num_kept)
        step = search.step
        search.step = lambda ancestors, *, last: step(ancestors, last=False)
        return search


class WideResult(SdpaAttention):
    """The result has another dtype than the inputs."""

    def packed(self, layout, cache=None):
        return Changed(super().packed(layout, cache), lambda run, *args: run(*args).double())


class FrozenGraph(CpuGraph):
    """A replay returns what the capture gave."""

    def capture(self, function, pool=None):
        result = function()
        return CpuCapturedGraph(lambda: result)


class LastOfThePool(CpuGraph):
    """Graphs of one pool overwrite each other."""

    def new_pool(self):
        return []

    def capture(self, function, pool=None):
        pool = [] if pool is None else pool
        pool.append(function)
        return CpuCapturedGraph(lambda: pool[-1]())


class DrawsOnceMore(CpuGraph):
    """A replay leaves the generator further on than an eager call."""

    def capture(self, function, pool=None):
        return CpuCapturedGraph(lambda: (function(), torch.rand(1))[0])


class Counted(CpuGraph):
    """Two graphs at a time."""

    live = 0

    def budget(self):
        return 2 - self.live

    def capture(self, function, pool=None):
        if self.budget() == 0:
            raise HardwareError("graph_budget_exhausted", "Both are in use.")
        self.live += 1
        graph = CpuCapturedGraph(function)
        graph.close = self._close
        return graph

    def _close(self):
        self.live -= 1


class NeverGivesBack(Counted):
    def _close(self):
        pass


class NeverCounts(Counted):
    def budget(self):
        return 2


class NeverRefuses(Counted):
    def capture(self, function, pool=None):
        self.live += 1
        graph = CpuCapturedGraph(function)
        graph.close = self._close
        return graph


class AliasedCopy(CpuRuntime):
    def to_host_async(self, tensor):
        return tensor, HostEvent()


class NeverDone(CpuRuntime):
    def to_host_async(self, tensor):
        copy, event = super().to_host_async(tensor)
        event.query = lambda: False
        return copy, event


class LosesStrides(CpuRuntime):
    def to_device(self, tensor):
        return torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape).stride())


class TurnsIntoFloats(CpuRuntime):
    def to_device(self, tensor):
        return tensor.float()


class NoSeed(CpuRuntime):
    def seed(self, seed):
        pass


class NoRestore(CpuRuntime):
    def set_rng_state(self, state):
        pass


class AnyIndex(CpuRuntime):
    def select(self, index):
        pass


class TwoDevices(CpuRuntime):
    def device_count(self):
        return 2


class NoTime(CpuRuntime):
    def event(self, *, timing=False):
        event = super().event(timing=timing)
        event.elapsed_time = lambda end: 0.0
        return event


class NoAutocast(CpuRuntime):
    def autocast(self, dtype):
        return nullcontext()
