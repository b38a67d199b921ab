"""What attention is, written as plainly as possible in float64: one query token at a time, over a list of the tokens it sees.

Shares nothing with any backend, so that a common mistake cannot hide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..hardware.base.attention import AttentionNeeds


def attend(query: Tensor, keys: Tensor, values: Tensor, soft_cap: float | None = None) -> Tensor:
    """One token's attention. query [heads, D], keys and values [N, kv heads, D], all float64 -> [heads · D]."""
    dim = query.shape[1]
    grouped = query.unflatten(0, (keys.shape[1], -1))  # [kv heads, group, D]
    scores = torch.einsum("kgd,nkd->kgn", grouped, keys) / dim**0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("kgn,nkd->kgd", weights, values).reshape(-1)


def within(window: int | None, path: list[int]) -> list[int]:
    """The tokens of a path (oldest first, the query's own last) that the query sees."""
    return path if window is None else path[-window:]


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    branch: Sequence[int] | None,
    needs: AttentionNeeds,
) -> Tensor:
    """Packed sequences, float64: query [T, heads, D], key and value [T, kv heads, D] -> [T, heads · D].

    A token's path is every earlier token of its sequence that is of the prompt or of its own branch, then itself.
    """
    rows, start = [], 0
    for length in lengths:
        for token in range(start, start + length):
            earlier = range(start, token + 1)
            path = [t for t in earlier if branch is None or branch[t] in (0, branch[token])]
            seen = within(needs.sliding_window, path)
            rows.append(attend(query[token], key[seen], value[seen], needs.soft_cap))
        start += length
    return torch.stack(rows)


def beam_attention(
    query: Tensor, prompt: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], needs: AttentionNeeds
) -> Tensor:
    """One beam's newest token. query [heads, D]; prompt: keys and values [N, kv heads, D] of its request; own: key and value
    [kv heads, D] of each token the beam has taken, the newest last. All float64 -> [heads · D]."""
    keys = torch.cat((prompt[0], torch.stack([key for key, _ in own])))
    values = torch.cat((prompt[1], torch.stack([value for _, value in own])))
    seen = within(needs.sliding_window, list(range(len(keys))))
    return attend(query, keys[seen], values[seen], needs.soft_cap)
