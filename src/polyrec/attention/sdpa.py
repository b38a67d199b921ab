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
        self._bias = torch.zeros(prompt_mask.shape, device=prompt_mask.device).masked_fill(~prompt_mask, float("-inf"))
        self._suffix = suffix
        self._ancestors = ancestors
        self._last = last

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        prompt_keys, prompt_values = self._prompt[layer]
        requests, kv_heads, length, dim = prompt_keys.shape
        rows, heads = query.shape[:2]
        width, group, step = rows // requests, heads // kv_heads, self._ancestors.shape[1]
        # The beam's own tokens: earlier ones by ancestor, and the one just taken.
        steps = torch.arange(step, device=query.device)
        own_keys = torch.cat(
            (self._suffix.keys[layer][steps, self._ancestors], key[:, None]), 1
        )  # [rows, step + 1, KV, D]
        own_values = torch.cat((self._suffix.values[layer][steps, self._ancestors], value[:, None]), 1)
        if not self._last:
            self._suffix.keys[layer, step, :rows] = key
            self._suffix.values[layer, step, :rows] = value
        scaled = query * dim**-0.5
        # All beams of a request are queries against one copy of its prompt: [R, KV, W · group, L].
        by_request = scaled.view(requests, width, kv_heads, group, dim).permute(0, 2, 1, 3, 4)
        to_prompt = by_request.reshape(requests, kv_heads, width * group, dim) @ prompt_keys.transpose(2, 3)
        to_prompt = (to_prompt + self._bias[:, None, None]).to(query.dtype)
        by_row = scaled.view(rows, kv_heads, group, dim)
        to_own = by_row @ own_keys.permute(0, 2, 3, 1)  # [rows, KV, group, step + 1]
        to_own = to_own.view(requests, width, kv_heads, group, step + 1).permute(0, 2, 1, 3, 4)
        scores = torch.cat((to_prompt, to_own.reshape(requests, kv_heads, width * group, step + 1)), -1)
        weight = torch.softmax(scores.float(), -1).to(query.dtype)
        from_prompt = weight[..., :length] @ prompt_values  # [R, KV, W · group, D]
        own_weight = weight[..., length:].reshape(requests, kv_heads, width, group, step + 1).transpose(1, 2)
        from_own = own_weight.reshape(rows, kv_heads, group, step + 1) @ own_values.transpose(1, 2)
        out = from_prompt.view(requests, kv_heads, width, group, dim).transpose(1, 2).reshape(rows, heads, dim)
        return (out + from_own.reshape(rows, heads, dim)).flatten(1)


def padded_prompt(pool: KVPool, layout: PackedLayout) -> list[tuple[Tensor, Tensor]]:
    """Per layer the prompts' keys and values as [R, kv heads, L, D], gathered once for all passes of a search."""
    return [
        tuple(part[layout.padded].transpose(1, 2).contiguous() for part in pool.layer(layer))  # type: ignore[misc]
        for layer in range(pool.keys.shape[0])
    ]
