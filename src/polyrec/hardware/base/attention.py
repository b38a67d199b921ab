"""The seam between models and attention: what a model needs, what a backend supports, and the plans of one batch.

A model's layer knows only `AttentionPlan.run`. Which tokens see which, where keys and values are kept, and which kernel does
it is the plan's business, so training, prefill and a beam pass go through one and the same model code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..ops import PlatformOps
from ..ops.kv import Located, locate
from ..ops.linear import QuantizedRows


@dataclass(frozen=True)
class AttentionNeeds:
    """What a model asks of attention. sliding_window: tokens a query sees, itself included; None: all before it.

    soft_cap: scores become soft_cap · tanh(score / soft_cap). mla: latent keys and values (DeepSeek). quantized: results go
    into products of e4m3, so a plan may give them as `QuantizedRows`.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    soft_cap: float | None = None
    mla: bool = False
    train: bool = False
    quantized: bool = False


@dataclass(frozen=True)
class AttentionSupport:
    """What a backend can do. head_dims, dtypes, platforms: None for any.

    prefix: `packed` takes sequences whose first tokens are in the cache already; without it no prefix is reused.
    """

    head_dims: tuple[int, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    platforms: tuple[str, ...] | None = None
    sliding_window: bool = False
    soft_cap: bool = False
    mla: bool = False
    train: bool = False
    prefix: bool = False

    def lacks(self, needs: AttentionNeeds, platform: str | None) -> list[str]:
        """What of the needs it cannot do, in words; empty when it fits. platform None: it runs there, as the platform says."""
        asked = {
            f"head size {needs.head_dim}": self.head_dims is not None and needs.head_dim not in self.head_dims,
            f"dtype {needs.dtype}": self.dtypes is not None and needs.dtype not in self.dtypes,
            f"platform {platform}": None not in (self.platforms, platform) and platform not in (self.platforms or ()),
            f"a sliding window of {needs.sliding_window}": needs.sliding_window is not None and not self.sliding_window,
            f"a soft cap of {needs.soft_cap}": needs.soft_cap is not None and not self.soft_cap,
            "latent attention (MLA)": needs.mla and not self.mla,
            "gradients": needs.train and not self.train,
        }
        return [what for what, lacking in asked.items() if lacking]


@dataclass(frozen=True)
class PageTable:
    """Which pages of a cache hold the keys and values of R prompts: token t of prompt r lies in slot
    pages[r, t // page_size] · page_size + t % page_size.

    pages: int32 [R, P]; places behind a prompt's end hold page 0, which no prompt owns: rows that belong to no sequence are
    written there. longest: at least the longest prompt. cached: int64 [R], how many of each prompt's first tokens are in the
    cache already, and not among the packed rows; None: of none. host_pages, host_cached: the same on the host; None: only the
    device knows them. all_begun: something of every prompt is known to be in the cache.
    """

    pages: Tensor
    page_size: int
    longest: int
    cached: Tensor | None = None
    host_pages: Tensor | None = None
    host_cached: Tensor | None = None
    all_begun: bool = False


@dataclass(frozen=True)
class PackedLayout:
    """R sequences, packed one after another into num_tokens rows; rows after the last sequence belong to none.

    lengths: int64 [R], zero for a place without a sequence. longest: at least the longest one. branch: int64 [T], 0 for a
    sequence's prompt and b ≥ 1 for its b-th branch, which sees the prompt and itself; None: no branches. A captured graph keeps
    longest and num_tokens, and reads lengths anew. host_lengths: the same lengths on the host, all rows theirs; None: only the
    device knows them. table: where the cache keeps them; None: packed token t in slot t. host_plan: of a prefill or a search
    that is captured, if its attention has one. located: where its rows belong, if a platform's operation has found it; None:
    torch does, when asked.
    """

    lengths: Tensor
    longest: int
    num_tokens: int
    branch: Tensor | None = None
    host_lengths: Tensor | None = None
    table: PageTable | None = None
    host_plan: HostPlan | None = None
    located: Located | None = None

    @cached_property
    def starts(self) -> Tensor:
        """int64 [R], each sequence's first row."""
        return torch.cumsum(self.lengths, 0) - self.lengths

    @cached_property
    def padded(self) -> Tensor:
        """int64 [R, longest], the row of each place of a padded batch; padding repeats row 0."""
        column = torch.arange(self.longest, device=self.lengths.device)
        return torch.where(column < self.lengths[:, None], self.starts[:, None] + column, 0)

    @cached_property
    def flat(self) -> Tensor:
        """int64 [T], the place of each row in a padded batch; every row belongs to a sequence."""
        offset = torch.arange(len(self.lengths), device=self.lengths.device) * self.longest - self.starts
        row = torch.arange(self.num_tokens, device=self.lengths.device)
        return row + torch.repeat_interleave(offset, self.lengths, output_size=self.num_tokens)

    @property
    def cached(self) -> Tensor | None:
        """int64 [R], tokens of each prompt that are in the cache already; None: of none."""
        return None if self.table is None else self.table.cached

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """int64 [R], tokens of each prompt: those in the cache already, and the packed ones."""
        return self.lengths if self.cached is None else self.lengths + self.cached

    @property
    def longest_prompt(self) -> int:
        """At least the longest of `prompt_lengths`."""
        return self.longest if self.table is None else self.table.longest

    def located_by(self, locate: Callable[..., Located]) -> PackedLayout:
        """The same layout with `located` from an implementation of `kv.locate`."""
        pages, size = (None, 1) if self.table is None else (self.table.pages, self.table.page_size)
        return replace(self, located=locate(self.lengths, self.cached, pages, size, self.num_tokens))

    @cached_property
    def _located(self) -> Located:
        return self.located or self.located_by(locate)._located

    @property
    def last(self) -> Tensor:
        """int64 [R], each sequence's last row; of a place without a sequence the last row before it, or row 0."""
        return self._located.last

    @property
    def positions(self) -> Tensor:
        """int64 [T], the place of each row in its prompt, cached tokens counted; 0 for a row without a sequence."""
        return self._located.positions

    @property
    def slots(self) -> Tensor:
        """int64 [T], the slot of the cache that each packed row's key and value go to; page 0 takes rows without a sequence."""
        return self._located.slots

    @cached_property
    def of_last(self) -> PackedLayout:
        """The layout of the rows `last`, each a sequence of its own of whose prompt all before it is in the cache."""
        assert self.table is not None, "only a table says where prompts lie"
        before = (self.prompt_lengths - 1).clamp_min(0)
        table = replace(self.table, cached=before, host_pages=None, host_cached=None, all_begun=False)
        return PackedLayout(torch.ones_like(self.lengths), 1, len(self.lengths), table=table)

    @cached_property
    def prompt_slots(self) -> Tensor:
        """int64 [R, longest prompt], the slot of each token of each prompt; some slot of the cache behind a prompt's end."""
        if self.table is None:
            return self.padded
        column = torch.arange(self.table.longest, device=self.lengths.device)
        size = self.table.page_size
        return self.table.pages[:, column // size] * size + column % size


class KeyValueCache(Protocol):
    """Where prompts' keys and values are kept; `PackedLayout.slots` says in which row."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [slots, kv heads, D] each."""
        ...


class WriteTarget(NamedTuple):
    """Where one layer's new keys and values go: rows `slots` int64 [T] of keys and values [slots, kv heads, D]."""

    keys: Tensor
    values: Tensor
    slots: Tensor


class HostPlan(ABC):
    """The part of a captured prefill's or search's attention that the host works out for each batch: which program does what,
    say."""

    @abstractmethod
    def renew(self, lengths: Tensor) -> None:
        """Before a replay, in its stream: for sequences of `lengths` int64 [R] (host), of a search for whole prompts. The rows
        behind them belong to none. The device's page table is the batch's by then."""


class HeadRotation(NamedTuple):
    """What turns a product's queries and keys into those that attend: weights of the heads' norms [D], cos and sin fp32
    [T, D / 2], and the norms' eps."""

    query_weight: Tensor
    key_weight: Tensor
    cos: Tensor
    sin: Tensor
    eps: float


class AttentionPlan(ABC):
    """One batch's attention, for all layers."""

    @property
    def rotates(self) -> bool:
        """Whether `run_product` is there: the platform's attention then does what its rotation would, in a launch less."""
        return False

    @abstractmethod
    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | QuantizedRows:
        """Attention of one layer. query [T, heads, D], key and value [T, kv heads, D], rotated -> [T, heads · D]; quantised
        only where `AttentionNeeds.quantized`."""

    def target(self, layer: int) -> WriteTarget | None:
        """Where the caller may write keys and values itself, in the kernel that rotates them; it then calls `run_written`.

        None: nothing is kept, or `run` alone knows how to keep it.
        """
        return None

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | QuantizedRows:
        """`run` for keys and values that are in `target(layer)` already: each is written once."""
        raise NotImplementedError(f"{type(self).__name__} names no target.")

    def run_product(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: HeadRotation
    ) -> Tensor | QuantizedRows:
        """`run` for queries and keys as they leave the product, neither normalised nor rotated."""
        raise NotImplementedError(f"{type(self).__name__} does not rotate.")


class SearchAttention(ABC):
    """Attention of one batch's search: R requests, whose beams share their request's prompt."""

    @abstractmethod
    def step(self, ancestors: Tensor, *, last: bool) -> AttentionPlan:
        """The plan of one pass over R · W beams, each with one new token.

        ancestors: int64 [R · W, t], the row in which each of the beam's t earlier tokens was given to `run`, oldest first.
        last: no later pass reads this pass's keys and values, so they need not be kept.
        """


class AttentionBackend(ABC):
    """One way to compute attention, built once per engine or trainer.

    support: what it can do; a model that needs more is refused before this is built. capturable: shapes follow from the
    layout's longest and num_tokens alone and nothing synchronises, so prefill and search can be captured.
    """

    support: ClassVar[AttentionSupport]
    capturable: ClassVar[bool] = False

    def __init__(self, needs: AttentionNeeds, ops: PlatformOps) -> None:
        self.needs = needs
        self.ops = ops

    @abstractmethod
    def packed(self, layout: PackedLayout, cache: KeyValueCache | None = None) -> AttentionPlan:
        """The plan of training and prefill: each sequence sees itself, causally, and what of its prompt the cache holds.

        cache: where `run` keeps keys and values, in `layout.slots`.
        """

    @abstractmethod
    def search(self, layout: PackedLayout, cache: KeyValueCache, *, width: int, num_kept: int) -> SearchAttention:
        """Attention for the passes after a prefill whose keys and values are in `cache`, in `layout.prompt_slots`.

        width: beams a request has at most. num_kept: passes whose keys and values a later pass reads.
        """

    def host_plan(self, num_tokens: int, places: int) -> HostPlan | None:
        """Asked for before a prefill of `num_tokens` rows, of at most `places` whole prompts, is captured; `packed` then finds
        it in the layout. None: the device needs nothing from the host."""
        return None

    def search_host_plan(self, table: PageTable, cache: KeyValueCache, *, width: int) -> HostPlan | None:
        """The same before a search is captured, of at most as many prompts as the table (device) has rows, `width` beams each;
        `search` then finds it in the layout."""
        return None

    def refresh(self, states: Mapping[str, Tensor]) -> None:  # noqa: B027 (most backends keep lengths on the device)
        """Called before a captured search is replayed: lengths and tables for backends that keep them on the host."""
