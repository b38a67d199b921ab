"""A beam pass equals plain float64 attention of each beam over its request's prompt, its ancestors' tokens and its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyrec.attention.sdpa import BeamSuffix, SdpaSearch


def strided(rng, rows, heads, kv_heads, dim, dtype):
    fused = torch.from_numpy(rng.standard_normal((rows, (heads + 2 * kv_heads) * dim))).to(dtype)
    parts = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    return tuple(part.unflatten(-1, (-1, dim)) for part in parts)


def softmax_over(query, keys, values):
    """query [H, D], keys and values [N, KV, D], numpy float64 -> [H · D]."""
    group = query.shape[0] // keys.shape[1]
    out = []
    for head, q in enumerate(query):
        logits = keys[:, head // group] @ q / np.sqrt(len(q))
        weight = np.exp(logits - logits.max())
        out.append(weight / weight.sum() @ values[:, head // group])
    return np.concatenate(out)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (4, 2, 8), (6, 1, 4)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_plain_attention(num_steps, heads, kv_heads, dim, last, dtype):
    rng = np.random.default_rng(100 * num_steps + 10 * heads + last)
    lengths = rng.integers(1, 9, 3)
    requests, width, longest, layers, layer = len(lengths), 4, int(lengths.max()), 2, 1
    rows = requests * width
    draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape)).to(dtype)  # noqa: E731
    prompt = [(draw(requests, kv_heads, longest, dim), draw(requests, kv_heads, longest, dim)) for _ in range(layers)]
    suffix = BeamSuffix(layers, num_steps + (not last), rows, kv_heads, dim, like=draw(1))
    suffix.keys.copy_(draw(*suffix.keys.shape))
    suffix.values.copy_(draw(*suffix.values.shape))
    # Ancestors stay within their request, but several beams may share one.
    own = np.repeat(np.arange(requests), width)[:, None] * width
    ancestors = torch.from_numpy(own + rng.integers(0, width, (rows, num_steps)))
    query, key, value = strided(rng, rows, heads, kv_heads, dim, dtype)
    kept = suffix.keys.clone(), suffix.values.clone()

    plan = SdpaSearch(prompt, torch.from_numpy(lengths), suffix).step(ancestors, last=last)
    out = plan.run(layer, query, key, value)

    assert out.dtype == dtype
    expected = []
    for row in range(rows):
        request, length = row // width, lengths[row // width]
        before = [
            np.stack([part[layer, step, int(ancestors[row, step])].double().numpy() for step in range(num_steps)])
            if num_steps
            else np.zeros((0, kv_heads, dim))
            for part in kept
        ]
        keys, values = (
            np.concatenate([shared[request, :, :length].transpose(0, 1).double().numpy(), earlier, [x[row].numpy()]])
            for shared, earlier, x in zip(prompt[layer], before, (key, value), strict=True)
        )
        expected.append(softmax_over(query[row].double().numpy(), keys, values))
    np.testing.assert_allclose(out.double().numpy(), np.stack(expected), rtol=2e-5, atol=2e-5)
    # A pass stores its own token for the passes after it, the last one and the other layers stay as they were.
    for part, old, new in zip((suffix.keys, suffix.values), kept, (key, value), strict=True):
        if not last:
            old[layer, num_steps] = new
        torch.testing.assert_close(part, old, rtol=0, atol=0)


def one_pass(prompt, ancestors, qkv):
    """The last pass of two requests whose prompts have 2 and 6 tokens."""
    suffix = BeamSuffix(1, 1, 6, 2, 4, like=prompt[0][0])
    return SdpaSearch(prompt, torch.tensor([2, 6]), suffix).step(ancestors, last=True).run(0, *qkv)


def test_padding_and_other_requests_do_not_matter():
    rng = np.random.default_rng(1)
    draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape)).float()  # noqa: E731
    prompt = [(draw(2, 2, 6, 4), draw(2, 2, 6, 4))]
    qkv = strided(rng, 6, 4, 2, 4, torch.float32)
    ancestors = torch.zeros((6, 0), dtype=torch.int64)
    first = one_pass(prompt, ancestors, qkv)
    spoiled = [tuple(part.clone() for part in prompt[0])]
    for part in spoiled[0]:
        part[0, :, 2:] = 1e6
        part[1] = -part[1]
    again = one_pass(spoiled, ancestors, qkv)
    torch.testing.assert_close(again[:3], first[:3], rtol=0, atol=0)
    assert not torch.allclose(again[3:], first[3:])
