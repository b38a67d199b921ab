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
    """Any head size and dtype, sliding windows, soft caps, gradients; no latent keys and values."""

    support = AttentionSupport(sliding_window=True, soft_cap=True, train=True)

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


class Packed(AttentionPlan):
    """Training and prefill: sequence after sequence."""

    def __init__(self, attention: ExampleAttention, layout: PackedLayout, cache: KeyValueCache | None) -> None:
        self._attention = attention
        self._cache = cache
        self._lengths = layout.lengths.tolist()
        branches = torch.zeros_like(layout.flat) if layout.branch is None else layout.branch
        self._seen = [self._visible(branch) for branch in branches.split(self._lengths)]
        self._slots = torch.arange(len(branches), device=branches.device)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, heads, D], key and value [T, kv heads, D] -> [T, heads · D]."""
        if self._cache is not None:
            self._attention.ops.kv.write(key, value, *self._cache.layer(layer), self._slots)
        parts = (part.split(self._lengths) for part in (query, key, value))
        return torch.cat([self._sequence(*qkv, seen) for *qkv, seen in zip(*parts, self._seen, strict=True)])

    def _sequence(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = self._attention.scores(self._attention.grouped(query), key[None])
        weights = torch.softmax(scores.masked_fill(~seen[:, None, None], float("-inf")), -1)
        return torch.einsum("nkgm,mkd->nkgd", weights, value.float()).to(query.dtype).flatten(1)

    def _visible(self, branch: Tensor) -> Tensor:
        """branch int64 [N] -> bool [N, N]: earlier tokens of the prompt and of a token's own branch, within the window."""
        place = torch.arange(len(branch), device=branch.device)
        seen = (place[:, None] >= place) & ((branch == 0) | (branch == branch[:, None]))
        position = seen.sum(1)  # along the prompt and the token's own branch
        return seen & self._attention.within(position[:, None] - position)


class Search(SearchAttention):
    """The prompts stay where the prefill wrote them; the beams' own tokens are kept as they come."""

    def __init__(self, attention: ExampleAttention, layout: PackedLayout, cache: KeyValueCache) -> None:
        self.attention = attention
        self.cache = cache
        self.lengths = layout.lengths.tolist()
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
        width = len(query) // len(search.lengths)
        keys, values = search.cache.layer(layer)
        outputs, start = [], 0
        for request, length in enumerate(search.lengths):
            rows, slots = slice(request * width, (request + 1) * width), slice(start, start + length)
            outputs.append(self._request(query[rows], (keys[slots], values[slots]), own_key[rows], own_value[rows]))
            start += length
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
