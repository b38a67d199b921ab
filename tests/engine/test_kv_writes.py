"""Each prompt token's and each beam's keys and values are written once a layer, in a whole search: every write to their memory
is seen, whoever makes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from reference import random_items
from torch.utils._python_dispatch import TorchDispatchMode

from polyrec.attention import sdpa
from polyrec.engine import search as engine_search
from polyrec.engine.engine import Engine, EngineConfig
from polyrec.engine.scheduler import BatchLimits
from polyrec.engine.searches import SearchRequest
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.kvcache.options import PAGE_SIZE, KVConfig
from polyrec.layers.choices import LayerChoices
from polyrec.models.qwen3 import Qwen3, Qwen3Config
from polyrec.sid.layout import SidLayout
from polyrec.sid.trie import build_trie

SIZES = (5, 6, 7, 4)  # three passes: the first two keep what they compute
LAYERS, KV_HEADS, DIM = 5, 2, 8  # more layers than are split off a recorded prefill
WIDTH = 8


@dataclass
class Watched:
    """Memory whose writes are counted: one number for each of its own."""

    name: str
    memory: torch.Tensor
    writes: torch.Tensor


class Writes(TorchDispatchMode):
    """Counts, number by number, what operations write to watched memory. by: how often, by the memory, what was under way, and
    the operation that it came from."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, Watched] = {}
        self.by: Counter[tuple[str, str, str]] = Counter()
        self.phase, self.operation = "", ""

    def watch(self, name: str, memory: torch.Tensor) -> None:
        writes = torch.zeros(memory.untyped_storage().nbytes() // memory.element_size(), dtype=torch.int64)
        self.watched[memory.untyped_storage().data_ptr()] = Watched(name, memory, writes)

    def counts(self, name: str) -> torch.Tensor:
        """In the shape of what is watched under the name."""
        (found,) = (each for each in self.watched.values() if each.name == name)
        return found.writes[: found.memory.numel()].view(found.memory.shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, torch.Tensor):
                found = self.watched.get(value.untyped_storage().data_ptr())
                if found is not None:
                    self._count(found, func, value, args)
        return func(*args, **(kwargs or {}))

    def _count(self, found: Watched, func: Any, target: torch.Tensor, args: Any) -> None:
        counts = found.writes.as_strided(target.shape, target.stride(), target.storage_offset())
        if func is torch.ops.aten.index_copy_.default:
            _, dim, slots, rows = args
            counts.index_add_(dim, slots, torch.ones(rows.shape, dtype=torch.int64))
        else:  # of others, all that they are given
            counts += 1
        self.by[found.name, self.phase, self.operation] += 1


def telling(writes: Writes) -> Any:
    """The reference operations; those that write keys and values tell who they are meanwhile."""

    def told(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            before, writes.operation = writes.operation, name
            try:
                return function(*args)
            finally:
                writes.operation = before

        return call

    rope = {name: told(f"rope.{name}", getattr(REFERENCE_OPS.rope, name)) for name in ("rotary_store", STORE)}
    kv = replace(REFERENCE_OPS.kv, write=told("kv.write", REFERENCE_OPS.kv.write))
    return replace(REFERENCE_OPS, rope=replace(REFERENCE_OPS.rope, **rope), kv=kv)


STORE = "qk_norm_rotary_store"


class Search:
    """An engine on the CPU of which every write, call of a plan and batch is noted. calls: by what was under way, layer and
    method of the plan."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
        self.layout = SidLayout.contiguous(SIZES, 3)
        self.codes = random_items(np.random.default_rng(0), SIZES, 90)
        self.writes, self.calls, self.batches = Writes(), Counter(), []
        backend = build_hardware_backend(HardwareConfig(hardware_platform="cpu"))
        backend.ops = telling(self.writes)
        config = Qwen3Config(
            vocab_size=self.layout.end,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=KV_HEADS,
            head_dim=DIM,
            initializer_range=0.5,
        )
        model = Qwen3(config, backend.ops, LayerChoices(fused_qk_rope_kv=fused))
        model.init_weights(torch.Generator().manual_seed(0))
        limits = EngineConfig(limits=BatchLimits(max_requests=4, max_tokens=256), kv=KVConfig(max_length=120))
        self.engine = Engine(model.eval(), self.layout, build_trie(self.codes), backend, limits)
        run = self.engine._runner.run
        monkeypatch.setattr(self.engine._runner, "run", lambda batch: self.batches.append(batch) or run(batch))
        attention = self.engine._runner._searcher.attention
        packed, search = attention.packed, attention.search
        monkeypatch.setattr(attention, "packed", lambda *given: self._enter("prefill") or packed(*given))
        monkeypatch.setattr(attention, "search", lambda *given, **more: self._watch_suffix(search(*given, **more)))
        step = sdpa.SdpaSearch.step

        def told_step(own: Any, ancestors: torch.Tensor, *, last: bool) -> Any:
            return self._enter(f"pass {ancestors.shape[1]}") or step(own, ancestors, last=last)

        monkeypatch.setattr(sdpa.SdpaSearch, "step", told_step)
        for plan in (sdpa.PackedPlan, sdpa.BeamPlan):
            for method in ("run", "run_written"):
                monkeypatch.setattr(plan, method, self._noted(method, getattr(plan, method)))

    def ask(self, prompts: list[np.ndarray]) -> Any:
        """Runs them as one batch, all counts from zero -> that batch."""
        self.writes.watched.clear()
        for name in ("keys", "values"):
            self.writes.watch(f"pool {name}", getattr(self.engine.memory.pool, name))
        self.writes.by.clear()
        self.calls.clear()
        self.batches.clear()
        requests = [
            SearchRequest(np.append(tokens, self.layout.begin).astype(np.int64), 4, WIDTH) for tokens in prompts
        ]
        with self.writes:
            found = self.engine.run(requests)
        assert [len(result.leaves) for result in found] == [4] * len(prompts)
        (batch,) = self.batches
        return batch

    def _enter(self, phase: str) -> None:
        self.writes.phase = phase

    def _watch_suffix(self, made: sdpa.SdpaSearch) -> sdpa.SdpaSearch:
        for name in ("keys", "values"):
            self.writes.watch(f"suffix {name}", getattr(made.suffix, name))
        return made

    def _noted(self, method: str, function: Any) -> Any:
        def call(plan: Any, layer: int, *rows: torch.Tensor) -> torch.Tensor:
            if self.writes.operation == "":  # `run` calls the other one itself
                self.calls[self.writes.phase, layer, method] += 1
            before, self.writes.operation = self.writes.operation, f"plan.{method}"
            try:
                return function(plan, layer, *rows)
            finally:
                self.writes.operation = before

        return call


def slots_of_new_tokens(batch: Any) -> list[int]:
    """Of every prompt, the slots of the tokens that were not cached, by the meaning of a page table."""
    new, cached, _ = batch.numbers
    return [
        int(pages[token // PAGE_SIZE]) * PAGE_SIZE + token % PAGE_SIZE
        for pages, first, count in zip(batch.pages, cached, new, strict=True)
        for token in range(first, first + count)
    ]


def expect_written_once(search: Search, batch: Any, store: str) -> None:
    slots = slots_of_new_tokens(batch)
    assert len(set(slots)) == len(slots) == batch.numbers[0].sum()
    # Beams of a pass: as many as its level has nodes, at most as many as are asked for; rows of steps behind them stay free.
    num_beams = [min(WIDTH, len({tuple(item[: level + 1]) for item in search.codes})) for level in range(2)]
    assert num_beams[0] < num_beams[1]
    num_requests = batch.numbers.shape[1]
    of_prompts = torch.zeros(search.engine.memory.pool.num_slots, dtype=torch.int64)
    of_prompts[slots] = 1
    of_beams = torch.zeros((2, num_requests * WIDTH), dtype=torch.int64)
    for step, beams in enumerate(num_beams):
        of_beams[step, : num_requests * beams] = 1
    for part in ("keys", "values"):
        counts = search.writes.counts(f"pool {part}")
        assert torch.equal(counts, of_prompts[None, :, None, None].expand(LAYERS, -1, KV_HEADS, DIM)), part
        counts = search.writes.counts(f"suffix {part}")
        assert torch.equal(counts, of_beams[None, :, :, None, None].expand(LAYERS, -1, -1, KV_HEADS, DIM)), part
    # By whom: the operation that rotates, once a layer, and nobody in the last pass.
    assert search.writes.by == {
        (f"{memory} {part}", phase, store): LAYERS
        for memory, phase in (("pool", "prefill"), ("suffix", "pass 0"), ("suffix", "pass 1"))
        for part in ("keys", "values")
    }
    # Attention is told so; the last pass has nothing to be told of.
    methods = {"prefill": "run_written", "pass 0": "run_written", "pass 1": "run_written", "pass 2": "run"}
    assert search.calls == {(phase, layer, how): 1 for phase, how in methods.items() for layer in range(LAYERS)}


@pytest.mark.parametrize("last_rows", [False, True])
@pytest.mark.parametrize(("fused", "store"), [(True, f"rope.{STORE}"), (False, "rope.rotary_store")])
def test_a_search_writes_each_key_and_value_once(monkeypatch, fused, store, last_rows):
    """New users, and then users who return with a few tokens more: what is cached of them is not written again. last_rows: the
    last layer's queries are those of prompts' last rows alone, as in long prefills."""
    if last_rows:
        monkeypatch.setattr(engine_search, "LAST_ROWS_FROM", 1)
    search, rng = Search(monkeypatch, fused), np.random.default_rng(1)
    prompts = [rng.integers(0, search.layout.begin, length) for length in (40, 17, 63)]
    batch = search.ask(prompts)
    assert batch.numbers[1].tolist() == [0, 0, 0]
    expect_written_once(search, batch, store)
    batch = search.ask([np.append(tokens, rng.integers(0, search.layout.begin, 5)) for tokens in prompts])
    assert sorted(batch.numbers[1]) == [16, 32, 48], "but for the last page, which may not be full"
    expect_written_once(search, batch, store)
