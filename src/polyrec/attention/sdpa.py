"""Attention through torch's scaled_dot_product_attention: runs on every device.

`PackedPlan` serves training and prefill: several sequences, packed one after another, each alone. `BeamPlan` serves a pass of
the search: a request's beams read its prompt once and their own few tokens through ancestor indices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..hardware.ops import KVOps
from ..kvcache.pool import KVPool


@dataclass(frozen=True)
class PackedLayout:
    """How T packed tokens stand in a padded batch of R rows of L.

    padded: int64 [R, L] token of each place (padding repeats token 0). flat: int64 [T] place of each token in R · L.
    mask: fp32 [R, 1, L, L], 0 where a query (row) sees a key (column), else −inf; None: causal.
    """

    padded: Tensor
    flat: Tensor
    mask: Tensor | None

    def pad(self, packed: Tensor) -> Tensor:
        """[T, ...] -> [R, L, ...] with zeros as padding. A copy to known places: its gradient is a plain gather."""
        rows = packed.new_zeros((self.padded.numel(), *packed.shape[1:]))
        return rows.index_copy(0, self.flat, packed).unflatten(0, self.padded.shape)


def packed_layout(lengths: Tensor, branch: Tensor | None = None) -> PackedLayout:
    """Layout of sequences of `lengths` int64 [R] (host), packed in order.

    branch: int64 [T], 0 for a sequence's prompt and b >= 1 for its b-th branch: a branch sees the prompt and itself.
    """
    longest = int(lengths.max())
    starts = torch.cumsum(lengths, 0) - lengths
    column = torch.arange(longest)
    valid = column < lengths[:, None]
    padded = torch.where(valid, starts[:, None] + column, 0)
    flat = torch.nonzero(valid.flatten()).squeeze(1)
    if branch is None:
        return PackedLayout(padded, flat, None)
    of_place = branch[padded]
    causal = column[:, None] >= column
    shared = (of_place[:, None, :] == 0) | (of_place[:, None, :] == of_place[:, :, None])
    seen = torch.zeros(shared.shape).masked_fill_(~(causal & shared), float("-inf"))
    return PackedLayout(padded, flat, seen[:, None])


class PackedPlan:
    """Sequences attend to themselves only. With a pool, keys and values are kept in slots 0…T−1 for the search."""

    def __init__(self, layout: PackedLayout, pool: KVPool | None = None, ops: KVOps | None = None) -> None:
        self._layout = layout
        self._pool = pool
        self._ops = ops
        self._slots = torch.arange(len(layout.flat), device=layout.flat.device) if pool is not None else None

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._pool is not None and self._ops is not None and self._slots is not None:
            self._ops.write(key, value, *self._pool.layer(layer), self._slots)
        layout = self._layout
        q, k, v = (layout.pad(x).transpose(1, 2) for x in (query, key, value))
        mask = None if layout.mask is None else layout.mask.to(q.dtype)
        # Padding stands behind every real token of its row, so the causal mask alone keeps it out.
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, layout.flat).flatten(1)


class BeamSuffix:
    """Keys and values of the tokens that beams have taken: [layers, S − 2 steps, R · W rows, kv heads, D].

    They are written once and never copied: a beam finds its own through ancestor rows. The last pass stores nothing.
    """

    def __init__(self, num_layers: int, steps: int, rows: int, num_kv_heads: int, head_dim: int, like: Tensor) -> None:
        self.keys = like.new_empty((num_layers, steps, rows, num_kv_heads, head_dim))
        self.values = torch.empty_like(self.keys)


class BeamPlan:
    """One pass over R · W beams of R requests.

    prompt_keys, prompt_values: per layer [R, kv heads, L, D], padded. prompt_mask: bool [R, L], True at real tokens.
    ancestors: int64 [R · W, step], the row in which each earlier step's token of a beam was stored.
    """

    def __init__(
        self,
        prompt: list[tuple[Tensor, Tensor]],
        prompt_mask: Tensor,
        suffix: BeamSuffix,
        ancestors: Tensor,
        *,
        last: bool,
    ) -> None:
        self._prompt = prompt
        keys = prompt[0][0]
        bias = torch.zeros(prompt_mask.shape, dtype=keys.dtype, device=keys.device)
        bias.masked_fill_(~prompt_mask, float("-inf"))
        self._bias = bias.repeat_interleave(keys.shape[1], 0).unsqueeze(1)  # [R · KV, 1, L]
        self._suffix = suffix
        self._ancestors = ancestors
        self._last = last

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        requests, kv_heads, _, dim = self._prompt[layer][0].shape
        rows, heads = query.shape[:2]
        split = (requests, rows // requests, kv_heads, heads // kv_heads)  # R, W, KV, group
        # All beams of a request are queries against one copy of its prompt: [R · KV, W · group, D].
        by_request = query.view(*split, dim).transpose(1, 2).reshape(requests * kv_heads, -1, dim)
        from_prompt, prompt_lse = self._read_prompt(layer, by_request)
        parts = [from_prompt.view(requests, kv_heads, split[1], -1, dim).transpose(1, 2)]
        scores = [prompt_lse.view(requests, kv_heads, split[1], -1).transpose(1, 2)]
        # The beam's own tokens: a few per beam, so products element by element beat thousands of tiny matrices.
        scaled = query.view(*split, dim).float() * dim**-0.5
        for own_key, own_value in self._own(layer, key, value):
            scores.append((scaled * own_key.view(*split[:3], 1, dim)).sum(-1))
            parts.append(own_value.view(*split[:3], 1, dim))
        # The prompt counts as one token with the score log-sum-exp, so one small softmax merges all parts.
        weights = torch.softmax(torch.stack(scores), 0).unsqueeze(-1)
        out = parts[0] * weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            out = torch.addcmul(out, part, weight)
        return out.to(query.dtype).reshape(rows, heads * dim)

    def _read_prompt(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """query [R · KV, M, D] -> attention over the prompt [R · KV, M, D] and its log-sum-exp, fp32 [R · KV, M]."""
        keys, values = (part.flatten(0, 1) for part in self._prompt[layer])
        scores = torch.baddbmm(self._bias, query, keys.transpose(1, 2), alpha=query.shape[-1] ** -0.5).float()
        weights = torch.softmax(scores, -1)
        # The largest weight is exp(largest score − log-sum-exp): two cheap maxima instead of a second exponential.
        lse = scores.amax(-1) - weights.amax(-1).log()
        return torch.bmm(weights.to(query.dtype), values), lse

    def _own(self, layer: int, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [R · W, KV, D] of each token the beams have taken, the new one last; stores the new one."""
        step = self._ancestors.shape[1]
        keys, values = self._suffix.keys[layer], self._suffix.values[layer]
        own = [(keys[t, self._ancestors[:, t]], values[t, self._ancestors[:, t]]) for t in range(step)]
        if not self._last:
            keys[step, : len(key)] = key
            values[step, : len(value)] = value
        return [*own, (key, value)]


def padded_prompt(pool: KVPool, layout: PackedLayout) -> list[tuple[Tensor, Tensor]]:
    """Per layer the prompts' keys and values as [R, kv heads, L, D], gathered once for all passes of a search."""
    return [
        tuple(part[layout.padded].transpose(1, 2).contiguous() for part in pool.layer(layer))  # type: ignore[misc]
        for layer in range(pool.keys.shape[0])
    ]
