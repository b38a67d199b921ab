"""Attention through torch's scaled_dot_product_attention: runs on every device.

`PackedPlan` serves training and prefill: several sequences, packed one after another, each alone. `BeamPlan` serves a pass of
the search: a request's beams read its prompt once and their own few tokens through ancestor indices.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..hardware.base.attention import (
    AttentionBackend,
    AttentionNeeds,
    AttentionPlan,
    AttentionSupport,
    KeyValueCache,
    PackedLayout,
    SearchAttention,
    WriteTarget,
)
from ..hardware.ops import KVOps

Prompt = list[tuple[Tensor, Tensor]]


class SdpaAttention(AttentionBackend):
    """Any head size and dtype, sliding windows, soft caps, gradients, cached prefixes; no latent keys and values."""

    support = AttentionSupport(sliding_window=True, soft_cap=True, train=True, prefix=True)

    def packed(self, layout: PackedLayout, cache: KeyValueCache | None = None) -> AttentionPlan:
        needs = self.needs
        return PackedPlan(layout, cache, self.ops.kv, window=needs.sliding_window, soft_cap=needs.soft_cap)

    def search(self, layout: PackedLayout, cache: KeyValueCache, *, width: int, num_kept: int) -> SearchAttention:
        needs = self.needs
        prompt = padded_prompt(cache, layout, needs)
        rows = len(layout.lengths) * width
        suffix = BeamSuffix(needs.num_layers, num_kept, rows, needs.num_kv_heads, needs.head_dim, like=prompt[0][0])
        return SdpaSearch(prompt, layout.prompt_lengths, suffix, window=needs.sliding_window, soft_cap=needs.soft_cap)


class PackedPlan(AttentionPlan):
    """Sequences attend to themselves and to what the cache holds of their prompts; a cache keeps their keys and values."""

    def __init__(
        self,
        layout: PackedLayout,
        cache: KeyValueCache | None = None,
        ops: KVOps | None = None,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        self._shape = (len(layout.lengths), layout.longest)
        # Made here, not in a layer's call: a compiler cannot follow.
        self._flat = None if is_full(layout) else layout.flat
        self._cache = cache
        self._ops = ops
        self._soft_cap = soft_cap
        self._slots = layout.slots if cache is not None else None
        self._prompt_slots = None if layout.cached is None else layout.prompt_slots
        # torch's causal attention needs no mask, and is faster without: padding stands behind every real token of its row.
        within = window is None or window >= layout.longest
        plain = layout.branch is None and layout.cached is None and soft_cap is None and within
        self._mask = None if plain else packed_mask(layout, window)

    def target(self, layer: int) -> WriteTarget | None:
        if self._cache is None or self._slots is None:
            return None
        return WriteTarget(*self._cache.layer(layer), self._slots)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        target = self.target(layer)
        if target is not None and self._ops is not None:
            self._ops.write(key, value, *target)
        return self.run_written(layer, query, key, value)

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self._padded(layer, query, key, value))
        mask = None if self._mask is None else self._mask.to(q.dtype)
        if self._soft_cap is not None:
            out = capped_attention(q, k, v, mask, self._soft_cap)
        else:
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
            )
        rows = out.transpose(1, 2).flatten(0, 1)
        return (rows if self._flat is None else rows.index_select(0, self._flat)).flatten(1)

    def _padded(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, L, heads, D], and the keys and values that they may see: the packed ones, or all of their prompts."""
        query = pad(query, self._shape, self._flat)
        if self._prompt_slots is None or self._cache is None:
            return query, pad(key, self._shape, self._flat), pad(value, self._shape, self._flat)
        keys, values = (part[self._prompt_slots].to(query.dtype) for part in self._cache.layer(layer))
        return query, keys, values


def is_full(layout: PackedLayout) -> bool:
    """Whether all sequences are known to have the longest one's length: packed rows are then a batch without padding."""
    return layout.host_lengths is not None and bool((layout.host_lengths == layout.longest).all())


def pad(packed: Tensor, shape: tuple[int, int], flat: Tensor | None) -> Tensor:
    """[T, ...] -> [R, L, ...] with zeros as padding. flat: int64 [T], each row's place; None: there is no padding.

    A copy to known places: its gradient is a plain gather.
    """
    if flat is None:
        return packed.unflatten(0, shape)
    rows = packed.new_zeros((shape[0] * shape[1], *packed.shape[1:]))
    return rows.index_copy(0, flat, packed).unflatten(0, shape)


def packed_mask(layout: PackedLayout, window: int | None) -> Tensor:
    """fp32 [R or 1, 1, L, L]: 0 where a query (row) sees a key (column), else −inf. Every place sees itself, padding too.

    With cached tokens [R, 1, L, longest prompt]: keys are all of a prompt, queries its last tokens.
    """
    if layout.cached is not None:
        return prefix_mask(layout, layout.cached, window)
    column = torch.arange(layout.padded.shape[1], device=layout.padded.device)
    seen = (column[:, None] >= column)[None]
    if layout.branch is not None:
        of_place = layout.branch[layout.padded]
        seen = seen & ((of_place[:, None, :] == 0) | (of_place[:, None, :] == of_place[:, :, None]))
    if window is not None:
        position = seen.sum(-1)  # a place's number along its prompt and its own branch
        seen = seen & (position[:, :, None] - position[:, None, :] < window)
    return as_bias(seen)


def prefix_mask(layout: PackedLayout, cached: Tensor, window: int | None) -> Tensor:
    """fp32 [R, 1, L, longest prompt]. cached: int64 [R], the position of each sequence's first query."""
    assert layout.branch is None, "branches are packed for training, which reuses no prefix"
    position = cached[:, None, None] + torch.arange(layout.longest, device=cached.device)[:, None]
    column = torch.arange(layout.longest_prompt, device=cached.device)
    seen = column <= position
    if window is not None:
        seen &= position - column < window
    return as_bias(seen)


def as_bias(seen: Tensor) -> Tensor:
    """bool [R or 1, L, L'] -> fp32 [R or 1, 1, L, L']."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]


def capped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, soft_cap: float) -> Tensor:
    """query [R, heads, L, D], key and value [R, kv heads, L, D] -> [R, heads, L, D]; scores in at least fp32."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    scores = cap(query @ key.transpose(2, 3) * query.shape[-1] ** -0.5, soft_cap)
    if mask is not None:
        scores = scores + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, -1, dtype=wide).to(value.dtype) @ value


def cap(scores: Tensor, soft_cap: float | None) -> Tensor:
    """soft_cap · tanh(scores / soft_cap) (Gemma team, 2024)."""
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


class BeamSuffix:
    """Keys and values of the tokens that beams have taken: [layers, S − 2 steps, R · W rows, kv heads, D].

    They are written once and never copied: a beam finds its own through ancestor rows. The last pass stores nothing.
    """

    def __init__(self, num_layers: int, steps: int, rows: int, num_kv_heads: int, head_dim: int, like: Tensor) -> None:
        self.keys = like.new_empty((num_layers, steps, rows, num_kv_heads, head_dim))
        self.values = torch.empty_like(self.keys)
        self._rows = torch.arange(rows, device=like.device)

    def target(self, layer: int, step: int, num_rows: int) -> WriteTarget:
        """Where the first `num_rows` rows of a step keep their keys and values."""
        return WriteTarget(self.keys[layer, step], self.values[layer, step], self._rows[:num_rows])


class SdpaSearch(SearchAttention):
    """The prompts of one batch, gathered once for all passes, and what its beams add.

    prompt: per layer keys and values [R, kv heads, L, D], padded. lengths: int64 [R].
    """

    def __init__(
        self,
        prompt: Prompt,
        lengths: Tensor,
        suffix: BeamSuffix,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        self.prompt = prompt
        self.suffix = suffix
        self.soft_cap = soft_cap
        self.window = window
        self._lengths = lengths
        self._unwindowed = self._bias(None)

    def step(self, ancestors: Tensor, *, last: bool) -> BeamPlan:
        num_earlier = ancestors.shape[1]
        if self.window is None:
            return BeamPlan(self, self._unwindowed, ancestors, last=last)
        # A beam stands num_earlier + 1 tokens after its prompt's last one, whatever the prompt's length.
        sees_prompt = num_earlier + 1 < self.window
        return BeamPlan(self, self._bias(self.window - num_earlier) if sees_prompt else None, ancestors, last=last)

    def _bias(self, reach: int | None) -> Tensor:
        """[R · KV, 1, L]: 0 at a prompt's tokens, of which the last reach − 1 are seen (None: all), −inf elsewhere."""
        keys = self.prompt[0][0]
        column = torch.arange(keys.shape[2], device=keys.device)
        seen = column < self._lengths[:, None]
        if reach is not None:
            seen &= column > self._lengths[:, None] - reach
        bias = torch.zeros(seen.shape, dtype=keys.dtype, device=keys.device).masked_fill_(~seen, float("-inf"))
        return bias.repeat_interleave(keys.shape[1], 0).unsqueeze(1)


class BeamPlan(AttentionPlan):
    """One pass over R · W beams of R requests.

    bias: [R · KV, 1, L] added to the scores of the prompt; None: the window has left the prompt behind.
    ancestors: int64 [R · W, step], the row in which each earlier step's token of a beam was stored.
    """

    def __init__(self, search: SdpaSearch, bias: Tensor | None, ancestors: Tensor, *, last: bool) -> None:
        self._prompt = search.prompt
        self._suffix = search.suffix
        self._soft_cap = search.soft_cap
        self._bias = bias
        self._ancestors = ancestors
        self._oldest = 0 if search.window is None else max(0, ancestors.shape[1] + 1 - search.window)
        self._last = last

    def target(self, layer: int) -> WriteTarget | None:
        return None if self._last else self._suffix.target(layer, *reversed(self._ancestors.shape))

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        target = self.target(layer)
        if target is not None:
            target.keys[: len(key)] = key
            target.values[: len(value)] = value
        return self.run_written(layer, query, key, value)

    def run_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        requests, kv_heads, _, dim = self._prompt[layer][0].shape
        rows, heads = query.shape[:2]
        split = (requests, rows // requests, kv_heads, heads // kv_heads)  # R, W, KV, group
        parts, scores = [], []
        if self._bias is not None:
            # All beams of a request are queries against one copy of its prompt: [R · KV, W · group, D].
            by_request = query.view(*split, dim).transpose(1, 2).reshape(requests * kv_heads, -1, dim)
            from_prompt, prompt_lse = self._read_prompt(layer, by_request, self._bias)
            parts.append(from_prompt.view(requests, kv_heads, split[1], -1, dim).transpose(1, 2))
            scores.append(prompt_lse.view(requests, kv_heads, split[1], -1).transpose(1, 2))
        # The beam's own tokens: a few per beam, so products element by element beat thousands of tiny matrices.
        scaled = query.view(*split, dim).float() * dim**-0.5
        for own_key, own_value in self._own(layer, key, value):
            scores.append(cap((scaled * own_key.view(*split[:3], 1, dim)).sum(-1), self._soft_cap))
            parts.append(own_value.view(*split[:3], 1, dim))
        # The prompt counts as one token with the score log-sum-exp, so one small softmax merges all parts.
        weights = torch.softmax(torch.stack(scores), 0).unsqueeze(-1)
        out = parts[0] * weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            out = torch.addcmul(out, part, weight)
        return out.to(query.dtype).reshape(rows, heads * dim)

    def _read_prompt(self, layer: int, query: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """query [R · KV, M, D] -> attention over the prompt [R · KV, M, D] and its log-sum-exp, fp32 [R · KV, M]."""
        keys, values = (part.flatten(0, 1) for part in self._prompt[layer])
        scale = query.shape[-1] ** -0.5
        if self._soft_cap is None:
            scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=scale).float()
        else:
            scores = cap(torch.bmm(query, keys.transpose(1, 2)).float() * scale, self._soft_cap) + bias
        weights = torch.softmax(scores, -1)
        # The largest weight is exp(largest score − log-sum-exp): two cheap maxima instead of a second exponential.
        lse = scores.amax(-1) - weights.amax(-1).log()
        return torch.bmm(weights.to(query.dtype), values), lse

    def _own(self, layer: int, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [R · W, KV, D] of each token the beams have taken and see, the new one last."""
        step = self._ancestors.shape[1]
        keys, values = self._suffix.keys[layer], self._suffix.values[layer]
        own = [(keys[t, rows], values[t, rows]) for t in range(self._oldest, step) for rows in [self._ancestors[:, t]]]
        return [*own, (key, value)]


def padded_prompt(cache: KeyValueCache, layout: PackedLayout, needs: AttentionNeeds) -> Prompt:
    """Per layer the prompts' keys and values as [R, kv heads, L, D], gathered once for all passes of a search."""
    return [
        tuple(part[layout.prompt_slots].to(needs.dtype).transpose(1, 2).contiguous() for part in cache.layer(layer))  # type: ignore[misc]
        for layer in range(needs.num_layers)
    ]
