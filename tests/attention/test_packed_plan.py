"""Packed attention equals plain float64 softmax attention, query by query, over exactly the keys a query may see."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from polyrec.attention.layout import packed_layout
from polyrec.attention.sdpa import PackedPlan, padded_prompt
from polyrec.hardware.base.attention import AttentionNeeds, PackedLayout, PageTable
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.kvcache.pool import KVPool

SHAPES = [(4, 4, 8), (4, 2, 8), (6, 1, 4), (8, 2, 16)]  # heads, kv heads, head size


def strided_qkv(rng, tokens, heads, kv_heads, dim, dtype):
    """Queries, keys and values as a fused projection gives them: views into one matrix, not contiguous."""
    fused = torch.from_numpy(rng.standard_normal((tokens, (heads + 2 * kv_heads) * dim))).to(dtype)
    parts = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    query, key, value = (part.unflatten(-1, (-1, dim)) for part in parts)
    assert not query.is_contiguous()
    return query, key, value


def plain_attention(query, key, value, visible):
    """visible(i) -> the tokens that query i sees. numpy float64 [T, H, D], [T, KV, D] -> [T, H · D]."""
    query, key, value = (x.double().numpy() for x in (query, key, value))
    tokens, heads, dim = query.shape
    group = heads // key.shape[1]
    out = np.zeros((tokens, heads, dim))
    for i in range(tokens):
        seen = visible(i)
        for head in range(heads):
            logits = key[seen, head // group] @ query[i, head] / np.sqrt(dim)
            weight = np.exp(logits - logits.max())
            out[i, head] = weight / weight.sum() @ value[seen, head // group]
    return torch.from_numpy(out.reshape(tokens, heads * dim))


def random_branches(rng, lengths):
    """Owner and branch of each token: a prompt, then up to three branches of any length."""
    branch = []
    for length in lengths.tolist():
        prompt = int(rng.integers(1, length + 1))
        branch += [0] * prompt + np.sort(rng.integers(1, 4, length - prompt)).tolist()
    return torch.tensor(branch), torch.repeat_interleave(torch.arange(len(lengths)), lengths)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("branched", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_equals_plain_attention(heads, kv_heads, dim, branched, dtype, tolerance):
    rng = np.random.default_rng(heads * dim + branched)
    for _ in range(4):
        lengths = torch.from_numpy(rng.integers(1, 10, int(rng.integers(1, 5))))
        branch, owner = random_branches(rng, lengths)
        query, key, value = strided_qkv(rng, len(owner), heads, kv_heads, dim, dtype)

        def visible(i, branch=branch, owner=owner):
            of_branch = ((branch == 0) | (branch == branch[i])) if branched else torch.ones(len(branch), dtype=bool)
            return torch.nonzero((owner == owner[i]) & of_branch & (torch.arange(len(owner)) <= i)).flatten().numpy()

        plan = PackedPlan(packed_layout(lengths, branch if branched else None))
        out = plan.run(0, query, key, value)
        assert out.shape == (len(owner), heads * dim)
        expected = plain_attention(query, key, value, visible)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_pool_holds_the_prompts_keys_and_values():
    """What the search reads later: each layer's own rows, padded by request."""
    rng = np.random.default_rng(0)
    lengths = torch.tensor([3, 1, 5])
    layout = packed_layout(lengths)
    pool = KVPool(2, 9, 2, 4, dtype=torch.float32, device=torch.device("cpu"))
    plan = PackedPlan(layout, pool, REFERENCE_OPS.kv)
    given = [strided_qkv(rng, 9, 4, 2, 4, torch.float32) for _ in range(2)]
    for layer, qkv in enumerate(given):
        plan.run(layer, *qkv)
    for (keys, values), (_, key, value) in zip(
        padded_prompt(pool, layout, AttentionNeeds(2, 4, 2, 4)), given, strict=True
    ):
        start = 0
        for row, length in enumerate(lengths.tolist()):
            torch.testing.assert_close(keys[row, :, :length], key[start : start + length].transpose(0, 1))
            torch.testing.assert_close(values[row, :, :length], value[start : start + length].transpose(0, 1))
            start += length


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_the_rest_of_a_prompt_sees_what_is_cached_of_it(window, soft_cap):
    """Prompts in shuffled pages, some with a cached beginning: the rest gets what the whole prompt would have got."""
    rng = np.random.default_rng(7)
    size, heads, kv_heads, dim = 4, 4, 2, 8
    for _ in range(6):
        cached = torch.from_numpy(rng.integers(0, 4, 3)) * size
        lengths = torch.from_numpy(rng.integers(1, 9, 3))
        whole = cached + lengths
        pages = torch.from_numpy(rng.permutation(np.arange(1, 31)).reshape(3, 10)).int()
        pool = KVPool(1, 31 * size, kv_heads, dim, dtype=torch.float64, device=torch.device("cpu"))
        table = PageTable(pages, size, int(whole.max()))
        parts = [strided_qkv(rng, int(length), heads, kv_heads, dim, torch.float64) for length in whole]

        first = PackedLayout(cached, int(cached.max()), int(cached.sum()), table=table)
        begun = [torch.cat([part[i][:n] for part, n in zip(parts, cached, strict=True)]) for i in range(3)]
        if len(begun[0]):
            PackedPlan(first, pool, REFERENCE_OPS.kv).run(0, *begun)
        rest = PackedLayout(
            lengths, int(lengths.max()), int(lengths.sum()), table=dataclasses.replace(table, cached=cached)
        )
        ended = [torch.cat([part[i][n:] for part, n in zip(parts, cached, strict=True)]) for i in range(3)]
        out = PackedPlan(rest, pool, REFERENCE_OPS.kv, window=window, soft_cap=soft_cap).run(0, *ended)

        expected = torch.cat(
            [
                PackedPlan(packed_layout(torch.tensor([len(part[0])])), window=window, soft_cap=soft_cap).run(0, *part)[
                    n:
                ]
                for part, n in zip(parts, cached, strict=True)
            ]
        )
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
