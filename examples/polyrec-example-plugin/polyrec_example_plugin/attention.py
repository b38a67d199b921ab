"""One attention backend, exact and plain: every sequence, and every request's beams, by themselves and without padding.

The contract is polyrec.plugin_api.AttentionBackend: `packed` serves training and prefill, `search` the passes over beams.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyrec.plugin_api import (
    AttentionBackend,
    AttentionPlan,
    AttentionSupport,
    KeyValueCache,
    PackedLayout,
    SearchAttention,
    register_att_backend,
)

Kept = dict[tuple[int, int], tuple[Tensor, Tensor]]  # (pass, layer) -> the keys and values given to it


@register_att_backend("example")
class ExampleAttention(AttentionBackend):
    """Any head size and dtype, sliding windows, soft caps, gradients, cached prefixes; no latent keys and values."""

    support = AttentionSupport(sliding_window=True, soft_cap=True, train=True, prefix=True)

    def packed(self, layout: PackedLayout, cache: KeyValueCache | None = None) -> AttentionPlan:
        return Packed(self, layout, cache)

    def search(self, layout: PackedLayout, cache: KeyValueCache, *, width: int, num_kept: int) -> SearchAttention:
        return Search(self, layout, cache)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """query [N, kv heads, group, D], key [N or 1, M, kv heads, D] -> fp32 [N, kv heads, group, M]."""
        scores = torch.einsum("nkgd,nmkd->nkgm", query.float(), key.float().expand(len(query), -1, -1, -1))
        scores = scores * query.shape[-1] ** -0.5
        cap = self.needs.soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def within(self, distance: Tensor) -> Tensor:
        """Which tokens a query sees that come `distance` tokens before it."""
        window = self.needs.sliding_window
        return (distance >= 0) & (distance < (window or torch.iinfo(torch.int64).max))

    def grouped(self, query: Tensor) -> Tensor:
        """[N, heads, D] -> [N, kv heads, group, D]: the query heads that share a key."""
        return query.unflatten(1, (self.needs.num_kv_heads, -1))


def slots_of(layout: PackedLayout) -> list[Tensor]:
    """int64, for each request the slots of the cache in which its prompt's tokens lie."""
    return [row[:length] for row, length in zip(layout.prompt_slots, layout.prompt_lengths.tolist(), strict=True)]


class Packed(AttentionPlan):
    """Training and prefill: sequence after sequence."""

    def __init__(self, attention: ExampleAttention, layout: PackedLayout, cache: KeyValueCache | None) -> None:
        self._attention = attention
        self._cache = cache
        self._lengths = layout.lengths.tolist()
        self._slots = layout.slots
        branches = torch.zeros_like(layout.slots) if layout.branch is None else layout.branch
        cached = [0] * len(self._lengths) if layout.cached is None else layout.cached.tolist()
        parts = zip(branches.split(self._lengths), cached, strict=True)
        self._seen = [self._visible(branch, num_cached) for branch, num_cached in parts]
        # Where a prompt's first tokens are in the cache, so is all that its last ones see.
        self._prompts = None if layout.cached is None else slots_of(layout)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, heads, D], key and value [T, kv heads, D] -> [T, heads · D]."""
        keys, values = key.split(self._lengths), value.split(self._lengths)
        if self._cache is not None:
            self._attention.ops.kv.write(key, value, *self._cache.layer(layer), self._slots)
            if self._prompts is not None:
                keys, values = ([part[slots] for slots in self._prompts] for part in self._cache.layer(layer))
        sequences = zip(query.split(self._lengths), keys, values, self._seen, strict=True)
        return torch.cat([self._sequence(*sequence) for sequence in sequences])

    def _sequence(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        """query [N, heads, D], key and value [M, kv heads, D], seen bool [N, M] -> [N, heads · D]."""
        scores = self._attention.scores(self._attention.grouped(query), key[None])
        weights = torch.softmax(scores.masked_fill(~seen[:, None, None], float("-inf")), -1)
        return torch.einsum("nkgm,mkd->nkgd", weights, value.float()).to(query.dtype).flatten(1)

    def _visible(self, branch: Tensor, num_cached: int) -> Tensor:
        """branch int64 [N] of the packed tokens -> bool [N, cached + N]: what comes before a token in the prompt, whose first
        tokens may be cached, and in its own branch, within the window."""
        branch = torch.cat((branch.new_zeros(num_cached), branch))
        place = torch.arange(len(branch), device=branch.device)
        seen = (place[:, None] >= place) & ((branch == 0) | (branch == branch[:, None]))
        position = seen.sum(1)  # along the prompt and the token's own branch
        return (seen & self._attention.within(position[:, None] - position))[num_cached:]


class Search(SearchAttention):
    """The prompts stay where the prefill wrote them; the beams' own tokens are kept as they come."""

    def __init__(self, attention: ExampleAttention, layout: PackedLayout, cache: KeyValueCache) -> None:
        self.attention = attention
        self.cache = cache
        self.prompts = slots_of(layout)
        self.kept: Kept = {}

    def step(self, ancestors: Tensor, *, last: bool) -> AttentionPlan:
        return Pass(self, ancestors, last)


class Pass(AttentionPlan):
    """One pass over beams: each sees its request's prompt, its ancestors' tokens, and its own."""

    def __init__(self, search: Search, ancestors: Tensor, last: bool) -> None:
        self._search = search
        self._ancestors = ancestors
        self._last = last

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [R · W, heads, D], key and value [R · W, kv heads, D] -> [R · W, heads · D]."""
        search, number = self._search, self._ancestors.shape[1]
        own = [self._earlier(step, layer) for step in range(number)] + [(key, value)]
        own_key, own_value = (torch.stack(parts, 1) for parts in zip(*own, strict=True))  # [R · W, passes, kv heads, D]
        if not self._last:
            search.kept[number, layer] = key.clone(), value.clone()
        width = len(query) // len(search.prompts)
        keys, values = search.cache.layer(layer)
        outputs = []
        for request, slots in enumerate(search.prompts):
            rows = slice(request * width, (request + 1) * width)
            outputs.append(self._request(query[rows], (keys[slots], values[slots]), own_key[rows], own_value[rows]))
        return torch.cat(outputs)

    def _earlier(self, step: int, layer: int) -> tuple[Tensor, Tensor]:
        """The beams' tokens of an earlier pass, found through their ancestors."""
        key, value = self._search.kept[step, layer]
        return key[self._ancestors[:, step]], value[self._ancestors[:, step]]

    def _request(self, query: Tensor, prompt: tuple[Tensor, Tensor], own_key: Tensor, own_value: Tensor) -> Tensor:
        """One request's beams: query [W, heads, D], own_key and own_value [W, passes, kv heads, D] -> [W, heads · D]."""
        attention, num_prompt = self._search.attention, len(prompt[0])
        grouped = attention.grouped(query)
        scores = torch.cat((attention.scores(grouped, prompt[0][None]), attention.scores(grouped, own_key)), -1)
        place = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(~attention.within(scores.shape[-1] - 1 - place), float("-inf"))
        weights = torch.softmax(scores, -1)
        result = torch.einsum("wkgm,mkd->wkgd", weights[..., :num_prompt], prompt[1].float())
        result = result + torch.einsum("wkgm,wmkd->wkgd", weights[..., num_prompt:], own_value.float())
        return result.to(query.dtype).flatten(1)
