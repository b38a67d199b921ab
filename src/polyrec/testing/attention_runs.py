"""What the checks of attention run: a prefill, and a search after it, on a cache that shows what is read or written wrongly.

Each output is compared with `brute_force`. Inputs are views of one matrix, as a fused projection gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..hardware.base.attention import AttentionBackend, AttentionNeeds, AttentionPlan, PackedLayout, SearchAttention
from ..hardware.base.backend import HardwareBackend
from ..hardware.ops import PlatformOps
from ..hardware.ops.draw import Draw
from ..hardware.ops.linear import QuantizedRows
from ..hardware.ops.spec import TOLERANCES
from .brute_force import beam_attention, packed_attention
from .prompts import Prompts

# What slots of a paged cache hold that are nobody's: wrong to read, and finite, since behind a prompt's end a plan may read
# values that it then multiplies by zero.
FILLER = 30.0


class Rows(NamedTuple):
    """query [T, heads, D], key and value [T, kv heads, D]."""

    query: Tensor
    key: Tensor
    value: Tensor


def attend(plan: AttentionPlan, layer: int, rows: Rows, ops: PlatformOps) -> Tensor:
    """`plan.run`; in odd layers the caller writes keys and values first, where the plan names a target."""
    target = plan.target(layer) if layer % 2 else None
    if target is None:
        return plain(plan.run(layer, *rows))
    ops.kv.write(rows.key, rows.value, *target)
    return plain(plan.run_written(layer, *rows))


def plain(found: Tensor | QuantizedRows) -> Tensor:
    """A result of attention for which nobody takes quantised ones."""
    assert isinstance(found, Tensor), "quantised rows were not asked for"
    return found


def draw_fused(draw: Draw, num_tokens: int, needs: AttentionNeeds) -> Tensor:
    """[T, (heads + 2 · kv heads) · D]; values large enough that a soft cap bends the scores."""
    return draw.normal(num_tokens, (needs.num_heads + 2 * needs.num_kv_heads) * needs.head_dim, scale=1.3)


def split(fused: Tensor, needs: AttentionNeeds) -> Rows:
    """Views into the fused rows."""
    sizes = [heads * needs.head_dim for heads in (needs.num_heads, needs.num_kv_heads, needs.num_kv_heads)]
    return Rows(*(part.unflatten(-1, (-1, needs.head_dim)) for part in fused.split(sizes, dim=-1)))


class WatchedCache:
    """A cache in which reading what nobody wrote shows: it holds NaN until it is written, or `FILLER` if it is paged. Counts
    writes made through torch."""

    def __init__(self, needs: AttentionNeeds, num_slots: int, hardware: HardwareBackend, *, paged: bool) -> None:
        shape = (needs.num_layers, num_slots, needs.num_kv_heads, needs.head_dim)
        unwritten = FILLER if paged else float("nan")
        self.keys = torch.full(shape, unwritten, dtype=needs.dtype, device=hardware.runtime.device)
        self.values = self.keys.clone()
        self._to_host = hardware.runtime.to_host

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [slots, kv heads, D] each."""
        return self.keys[layer], self.values[layer]

    def put(self, layer: int, slots: list[int], rows: Rows) -> None:
        """Keys and values of a prompt's beginning, which no plan writes. rows: on the host."""
        place = torch.tensor(slots, dtype=torch.int64, device=self.keys.device)
        for cache, part in ((self.keys, rows.key), (self.values, rows.value)):
            cache[layer].index_copy_(0, place, part.to(cache.device))

    def copies(self) -> tuple[Tensor, Tensor]:
        """Keys and values on the host, as they are now."""
        return self._to_host(self.keys).clone(), self._to_host(self.values).clone()

    def versions(self) -> tuple[int, int]:
        """How often torch wrote in place into keys and values."""
        return self.keys._version, self.values._version


class Prefill:
    """The prefill of one batch, layer by layer; its output is compared with that of whole prompts."""

    def __init__(
        self,
        attention: AttentionBackend,
        needs: AttentionNeeds,
        hardware: HardwareBackend,
        cache: WatchedCache,
        prompts: Prompts,
        draw: Draw,
    ) -> None:
        self._needs = needs
        self._hardware = hardware
        self._cache = cache
        self._prompts = prompts
        self._draw = draw
        self.layout = prompts.layout(hardware)
        self._plan = attention.packed(self.layout, cache)
        # Asked for before the first one runs, as the engine does where keys and values are written for a plan.
        names_target = attention.support.prefix and self._plan.target(0) is not None
        self._of_last = attention.packed(self.layout.of_last, cache) if names_target and prompts.pages else None

    def begin(self, layer: int) -> Tensor:
        """Draws a layer's queries, keys and values of whole prompts, fused, and puts the beginnings into the cache."""
        prompts = self._prompts
        fused = draw_fused(self._draw, sum(prompts.lengths), self._needs)
        by_prompt = fused.split(list(prompts.lengths))
        for slots, rows, begun in zip(prompts.slots(), by_prompt, prompts.begun, strict=True):
            self._cache.put(layer, slots[:begun], split(rows[:begun], self._needs))
        return fused

    def run(self, layer: int, fused: Tensor, ops: PlatformOps) -> None:
        """The prefill of the rest."""
        prompts = self._prompts
        token = torch.cat([torch.arange(length) for length in prompts.lengths])
        is_rest = token >= torch.tensor(prompts.begun).repeat_interleave(torch.tensor(prompts.lengths))
        with torch.no_grad():
            found = attend(
                self._plan, layer, split(self._hardware.runtime.to_device(fused[is_rest]), self._needs), ops
            )  # fmt: skip
        whole = packed_attention(*split(fused.double(), self._needs), prompts.lengths, None, self._needs)
        expect_near(found, whole[is_rest], self._hardware, self._needs, f"the prefill of layer {layer}")

    def run_last(self, layer: int, fused: Tensor) -> None:
        """After `run`: each prompt's last row alone gets the same once more, by a plan of its own."""
        if self._of_last is None:
            return
        ends = torch.cumsum(torch.tensor(self._prompts.lengths), 0) - 1
        rows = split(self._hardware.runtime.to_device(fused[ends]), self._needs)
        with torch.no_grad():
            found = plain(self._of_last.run_written(layer, *rows))
        whole = packed_attention(*split(fused.double(), self._needs), self._prompts.lengths, None, self._needs)
        expect_near(found, whole[ends], self._hardware, self._needs, f"the prefill's last rows of layer {layer}")


class BeamWalk:
    """A prefill and a whole search of one batch, each output compared with the beam's own history."""

    def __init__(
        self,
        attention: AttentionBackend,
        needs: AttentionNeeds,
        hardware: HardwareBackend,
        cache: WatchedCache,
        prompts: Prompts,
        widths: Sequence[int],
        seed: int,
    ) -> None:
        self._attention = attention
        self._hardware = hardware
        self._cache = cache
        self._of_batch = prompts
        self._lengths = prompts.lengths
        self._widths = widths
        self._draw = Draw(needs.dtype, seed)
        self._needs = needs
        self._prompts: list[list[tuple[Tensor, Tensor]]] = []  # [layer][request]
        self._taken: list[list[Rows]] = []  # [pass][layer]

    def run(self) -> None:
        layout = self._prefill()
        self._attention.refresh({"lengths": layout.prompt_lengths})
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

    def _prefill(self) -> PackedLayout:
        prefill = Prefill(
            self._attention, self._needs, self._hardware, self._cache, self._of_batch, self._draw
        )  # fmt: skip
        for layer in range(self._needs.num_layers):
            fused = prefill.begin(layer)
            prefill.run(layer, fused, self._hardware.ops)
            _, key, value = (part.split(list(self._lengths)) for part in split(fused.double(), self._needs))
            self._prompts.append(list(zip(key, value, strict=True)))
        return prefill.layout

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
            expect_near(found, expected, self._hardware, self._needs, what)
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


def expect_near(
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
