"""What every attention backend must do, as functions that raise AssertionError; `testing.conformance` runs them under pytest.

Each compares with `testing.brute_force`. Inputs are views of one matrix, as a fused projection gives them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.layout import packed_layout
from ..hardware.base.attention import (
    AttentionBackend,
    AttentionNeeds,
    AttentionPlan,
    AttentionSupport,
    PackedLayout,
    SearchAttention,
)
from ..hardware.base.backend import HardwareBackend
from ..hardware.ops import PlatformOps
from ..hardware.ops.draw import Draw
from ..hardware.ops.spec import FLOATS, TOLERANCES
from .brute_force import beam_attention, packed_attention

Build = Callable[[AttentionNeeds, PlatformOps], AttentionBackend]
HEADS = ((4, 4), (4, 2), (6, 1))
LENGTHS = (6, 1, 9, 70)
BRANCH = (0, 0, 0, 1, 1, 2) + (0,) + (0, 0, 1, 1, 1, 2, 2, 3, 3) + (0,) * 40 + (1,) * 15 + (2,) * 15
WINDOWS = (1, 2, 4, 100)
SOFT_CAP = 1.5
SOME_HEAD_DIMS = (8, 20, 64, 80, 96, 128, 256)
BATCHES = ((5, 1, 9), (2, 3))
WIDTHS = (2, 3, 3, 4)  # beams of a request in each pass
_SPARE_SLOTS = 5


class Rows(NamedTuple):
    """query [T, heads, D], key and value [T, kv heads, D]."""

    query: Tensor
    key: Tensor
    value: Tensor


def attend(plan: AttentionPlan, layer: int, rows: Rows, ops: PlatformOps) -> Tensor:
    """`plan.run`; in odd layers the caller writes keys and values first, where the plan names a target."""
    target = plan.target(layer) if layer % 2 else None
    if target is None:
        return plan.run(layer, *rows)
    ops.kv.write(rows.key, rows.value, *target)
    return plan.run_written(layer, *rows)


def needs_for(
    support: AttentionSupport,
    dtype: torch.dtype,
    heads: tuple[int, int] = (4, 2),
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    train: bool = False,
    head_dim: int | None = None,
) -> AttentionNeeds:
    """A small model's needs. head_dim None: the smallest that the backend supports."""
    head_dim = head_dim or (min(support.head_dims) if support.head_dims else 16)
    return AttentionNeeds(
        2, *heads, head_dim, dtype=dtype, sliding_window=window, soft_cap=soft_cap, train=train
    )  # fmt: skip


def claimed_head_dims(support: AttentionSupport) -> tuple[int, ...]:
    """All that the backend names; of those that claim any, sizes that models have, and one that is no multiple of 16."""
    return SOME_HEAD_DIMS if support.head_dims is None else tuple(sorted(set(support.head_dims)))


def claimed_dtypes(support: AttentionSupport, hardware: HardwareBackend) -> tuple[torch.dtype, ...]:
    """The dtypes that backend and platform both claim."""
    claimed = FLOATS if support.dtypes is None else support.dtypes
    return tuple(dtype for dtype in claimed if dtype in hardware.capabilities.dtypes)


def check_packed(build: Build, hardware: HardwareBackend, needs: AttentionNeeds, *, branched: bool = False) -> None:
    """Sequences of ragged lengths see themselves alone, causally; a branch sees its prompt and itself."""
    draw = Draw(needs.dtype, seed=1)
    branch = BRANCH if branched else None
    plan = build(needs, hardware.ops).packed(_layout(LENGTHS, branch, hardware))
    for layer in range(needs.num_layers):
        fused = draw_fused(draw, sum(LENGTHS), needs)
        with torch.no_grad():
            found = attend(plan, layer, split(hardware.runtime.to_device(fused), needs), hardware.ops)
        expected = packed_attention(*split(fused.double(), needs), LENGTHS, branch, needs)
        _expect(found, expected, hardware, needs, f"packed attention of layer {layer}")


def check_gradients(build: Build, hardware: HardwareBackend, needs: AttentionNeeds, *, branched: bool = False) -> None:
    """Gradients of queries, keys and values."""
    draw = Draw(needs.dtype, seed=2)
    branch = BRANCH if branched else None
    plan = build(needs, hardware.ops).packed(_layout(LENGTHS, branch, hardware))
    fused = draw_fused(draw, sum(LENGTHS), needs)
    weight = draw.normal(sum(LENGTHS), needs.num_heads * needs.head_dim)
    ours = hardware.runtime.to_device(fused.clone()).requires_grad_()
    (plan.run(0, *split(ours, needs)) * hardware.runtime.to_device(weight)).sum().backward()
    wide = fused.double().requires_grad_()
    (packed_attention(*split(wide, needs), LENGTHS, branch, needs) * weight.double()).sum().backward()
    assert ours.grad is not None, "no gradient reached the inputs"
    assert wide.grad is not None
    _expect(ours.grad, wide.grad, hardware, needs, "the gradient of queries, keys and values", slack=4)


def check_cache(build: Build, hardware: HardwareBackend, needs: AttentionNeeds) -> None:
    """A prefill writes each layer's keys and values once into slots 0…T−1 of that layer, and nothing else."""
    draw = Draw(needs.dtype, seed=3)
    cache = WatchedCache(needs, sum(LENGTHS), hardware)
    ops, calls = _counting_writes(hardware.ops)
    plan = build(needs, ops).packed(_layout(LENGTHS, None, hardware), cache)
    for layer in range(needs.num_layers):
        fused = draw_fused(draw, sum(LENGTHS), needs)
        expected = cache.copies()
        for part, rows in zip(expected, split(fused, needs)[1:], strict=True):
            part[layer, : sum(LENGTHS)] = rows
        before, calls[:] = cache.versions(), []
        with torch.no_grad():
            attend(plan, layer, split(hardware.runtime.to_device(fused), needs), ops)
        for name, found, part in zip(("keys", "values"), cache.copies(), expected, strict=True):
            same = torch.equal(found.nan_to_num(), part.nan_to_num()) and torch.equal(found.isnan(), part.isnan())
            assert same, (
                f"layer {layer}: the cache's {name} are not the layer's own in slots 0…T−1 and untouched elsewhere"
            )
        times = [after - earlier for after, earlier in zip(cache.versions(), before, strict=True)]
        assert max(*times, len(calls)) <= 1, f"layer {layer}: keys and values were written {times} times, not once"


def check_beams(build: Build, hardware: HardwareBackend, needs: AttentionNeeds, widths: Sequence[int] = WIDTHS) -> None:
    """Passes over beams that change parents, for prompts of mixed lengths, in one batch after another on the same backend."""
    attention = build(needs, hardware.ops)
    cache = WatchedCache(needs, max(sum(lengths) for lengths in BATCHES), hardware)
    for number, lengths in enumerate(BATCHES):
        _BeamWalk(attention, needs, hardware, cache, lengths, widths, seed=10 + number).run()


class WatchedCache:
    """A cache that holds NaN until it is written, so that reading what nobody wrote shows; counts writes made through torch."""

    def __init__(self, needs: AttentionNeeds, num_tokens: int, hardware: HardwareBackend) -> None:
        shape = (needs.num_layers, num_tokens + _SPARE_SLOTS, needs.num_kv_heads, needs.head_dim)
        self.keys = torch.full(shape, float("nan"), dtype=needs.dtype, device=hardware.runtime.device)
        self.values = self.keys.clone()
        self._to_host = hardware.runtime.to_host

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [slots, kv heads, D] each."""
        return self.keys[layer], self.values[layer]

    def copies(self) -> tuple[Tensor, Tensor]:
        """Keys and values on the host, as they are now."""
        return self._to_host(self.keys).clone(), self._to_host(self.values).clone()

    def versions(self) -> tuple[int, int]:
        """How often torch wrote in place into keys and values."""
        return self.keys._version, self.values._version


class _BeamWalk:
    """A prefill and a whole search of one batch, each output compared with the beam's own history."""

    def __init__(
        self,
        attention: AttentionBackend,
        needs: AttentionNeeds,
        hardware: HardwareBackend,
        cache: WatchedCache,
        lengths: Sequence[int],
        widths: Sequence[int],
        seed: int,
    ) -> None:
        self._attention = attention
        self._hardware = hardware
        self._cache = cache
        self._lengths = lengths
        self._widths = widths
        self._draw = Draw(needs.dtype, seed)
        self._needs = needs
        self._prompts: list[list[tuple[Tensor, Tensor]]] = []  # [layer][request]
        self._taken: list[list[Rows]] = []  # [pass][layer]

    def run(self) -> None:
        layout = _layout(self._lengths, None, self._hardware)
        self._prefill(layout)
        self._attention.refresh({"lengths": layout.lengths})
        search = self._attention.search(layout, self._cache, width=max(self._widths), num_kept=len(self._widths) - 1)
        written = self._cache.versions()
        paths: list[list[int]] = [[] for _ in range(len(self._lengths) * self._widths[0])]
        for number, width in enumerate(self._widths):
            last = number == len(self._widths) - 1
            self._pass(search, paths, width, last=last)
            if last:  # it leaves nothing behind: other tokens in its place are not confused with it
                self._pass(search, paths, width, last=True)
            else:
                paths = self._reparented(paths, width, self._widths[number + 1])
        assert self._cache.versions() == written, "a beam pass wrote into the prompts' cache"

    def _prefill(self, layout: PackedLayout) -> None:
        plan = self._attention.packed(layout, self._cache)
        for layer in range(self._needs.num_layers):
            fused = draw_fused(self._draw, sum(self._lengths), self._needs)
            with torch.no_grad():
                attend(plan, layer, self._rows(fused), self._hardware.ops)
            _, key, value = (part.split(list(self._lengths)) for part in split(fused.double(), self._needs))
            self._prompts.append(list(zip(key, value, strict=True)))

    def _rows(self, fused: Tensor) -> Rows:
        return split(self._hardware.runtime.to_device(fused), self._needs)

    def _pass(self, search: SearchAttention, paths: list[list[int]], width: int, *, last: bool) -> None:
        num_earlier = len(paths[0])
        ancestors = torch.tensor(paths, dtype=torch.int64).reshape(len(paths), num_earlier)
        plan = search.step(self._hardware.runtime.to_device(ancestors), last=last)
        layers = []
        for layer in range(self._needs.num_layers):
            fused = draw_fused(self._draw, len(paths), self._needs)
            with torch.no_grad():
                found = attend(plan, layer, self._rows(fused), self._hardware.ops)
            rows = Rows(*split(fused.double(), self._needs))
            layers.append(rows)
            expected = torch.stack([self._expected(layer, rows, row, path, width) for row, path in enumerate(paths)])
            what = f"layer {layer} of pass {num_earlier + 1} of {len(self._widths)}"
            _expect(found, expected, self._hardware, self._needs, what)
        if not last:
            self._taken.append(layers)

    def _expected(self, layer: int, rows: Rows, row: int, path: list[int], width: int) -> Tensor:
        earlier = [(self._taken[t][layer].key[at], self._taken[t][layer].value[at]) for t, at in enumerate(path)]
        own = [*earlier, (rows.key[row], rows.value[row])]
        return beam_attention(rows.query[row], self._prompts[layer][row // width], own, self._needs)

    def _reparented(self, paths: list[list[int]], width: int, next_width: int) -> list[list[int]]:
        """Each new beam extends a beam of its own request: several may share one, some have no child, order is not kept."""
        parents = self._draw.integers(0, width, len(self._lengths), next_width)
        parents[:, 0] = width - 1  # never all in place
        rows = (torch.arange(len(self._lengths))[:, None] * width + parents).flatten().tolist()
        return [[*paths[row], row] for row in rows]


def draw_fused(draw: Draw, num_tokens: int, needs: AttentionNeeds) -> Tensor:
    """[T, (heads + 2 · kv heads) · D]; values large enough that a soft cap bends the scores."""
    return draw.normal(num_tokens, (needs.num_heads + 2 * needs.num_kv_heads) * needs.head_dim, scale=1.3)


def split(fused: Tensor, needs: AttentionNeeds) -> Rows:
    """Views into the fused rows."""
    sizes = [heads * needs.head_dim for heads in (needs.num_heads, needs.num_kv_heads, needs.num_kv_heads)]
    return Rows(*(part.unflatten(-1, (-1, needs.head_dim)) for part in fused.split(sizes, dim=-1)))


def _layout(lengths: Sequence[int], branch: Sequence[int] | None, hardware: HardwareBackend) -> PackedLayout:
    of_token = None if branch is None else torch.tensor(branch)
    return packed_layout(torch.tensor(lengths), of_token, hardware.runtime.to_device)


def _counting_writes(ops: PlatformOps) -> tuple[PlatformOps, list[None]]:
    """The ops with a kv.write that notes each call."""
    calls: list[None] = []

    def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        calls.append(None)
        ops.kv.write(key, value, key_cache, value_cache, slots)

    return dataclasses.replace(ops, kv=dataclasses.replace(ops.kv, write=write)), calls


def _expect(
    found: Tensor, expected: Tensor, hardware: HardwareBackend, needs: AttentionNeeds, what: str, slack: float = 1.0
) -> None:
    """Same dtype and shape, and near in the dtype's tolerance."""
    assert found.dtype == needs.dtype, f"{what} has dtype {found.dtype}, its inputs {needs.dtype}"
    assert found.shape == expected.shape, f"{what} has shape {list(found.shape)}, not {list(expected.shape)}"
    tolerance = TOLERANCES[needs.dtype]
    torch.testing.assert_close(
        hardware.runtime.to_host(found.detach()).double(),
        expected.detach(),
        rtol=slack * tolerance.relative,
        atol=slack * tolerance.absolute,
        msg=lambda text: f"{what} ({needs}): {text}",
    )
