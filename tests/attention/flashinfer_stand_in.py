"""A stand-in for FlashInfer that follows its documentation, on the host, and what else tests of it share."""

from __future__ import annotations

import importlib.util
import math
import sys

import pytest
import torch

INSTALLED = importlib.util.find_spec("flashinfer") is not None
on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Triton, which it stands on, is for Linux only"
)
on_device = pytest.mark.skipif(
    not (torch.cuda.is_available() and INSTALLED), reason="needs flashinfer, and a device that torch shows as cuda"
)


def attention_by_hand(query, keys, values, window=None, soft_cap=None):
    """Each sequence's last tokens see it, causally, in the dtype of the inputs: [T, heads, D] -> [T, heads, D].

    query: a tensor for each sequence, [N, heads, D]; keys, values: [at least N, kv heads, D].
    """
    parts = []
    for q, k, v in zip(query, keys, values, strict=True):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(len(k) - len(q), len(k), device=q.device)
        distance = position[:, None] - torch.arange(len(k), device=q.device)
        hidden = (distance < 0) | (distance >= (len(k) if window is None else window))
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(parts)


def whole_prompts_by_hand(query, keys, values, soft_cap=None):
    """The same where each token sees every key, and the logarithms of the softmaxes' sums in base 2: [T, heads]."""
    parts, sums = [], []
    for q, k, v in zip(query, keys, values, strict=True):
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / q.shape[-1] ** 0.5
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1)))
        sums.append(scores.logsumexp(-1).T / math.log(2))
    return torch.cat(parts), torch.cat(sums)


class Wrapper:
    """What both wrappers' documentation says of their memory and of the options of a plan."""

    log: list
    buffers: tuple[str, ...]  # of a captured plan, besides the query rows' bounds

    def __init__(self, workspace, kv_layout, *, use_cuda_graph=False, qo_indptr_buf=None, **buffers):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.captured = use_cuda_graph
        if use_cuda_graph:
            assert tuple(buffers) == self.buffers
            assert all(each.dtype == torch.int32 and each.dim() == 1 for each in (qo_indptr_buf, *buffers.values()))
            self.places, self.most_rows = len(qo_indptr_buf) - 1, None
            assert len(buffers[self.buffers[0]]) == self.places + 1
            self.kept = buffers

    def reset_workspace_buffer(self, workspace, numbers):
        """Captured plans of 0.6.12 hold seven int32 for each piece of at most 128 rows of a head, at its most a place."""
        assert workspace.dtype == numbers.dtype == torch.uint8
        self.room = numbers.numel()

    def keep(self, heads, kv_heads, head_dim, *, causal, window_left, logits_soft_cap, q_data_type, disable_split_kv):
        assert disable_split_kv
        if self.captured:
            assert len(self.lengths) == self.places
            self.most_rows = self.most_rows or sum(self.lengths)
            assert sum(self.lengths) <= self.most_rows
            assert self.room >= 28 * heads * (-(-self.most_rows // 128) + self.places)
        self.causal = causal
        self.expected = (heads, kv_heads, head_dim, q_data_type)
        self.window = None if window_left < 0 else window_left + 1
        self.soft_cap = logits_soft_cap

    def attend(self, q, keys, values):
        """In float64 -> the result, and without a causal mask the logarithms of sums."""
        query = q.double().split(self.lengths)
        keys, values = ([part.double() for part in parts] for parts in (keys, values))
        if self.causal:
            return attention_by_hand(query, keys, values, self.window, self.soft_cap).to(q.dtype), None
        assert self.window is None
        result, sums = whole_prompts_by_hand(query, keys, values, self.soft_cap)
        return result.to(q.dtype), sums.float()


def lengths_between(bounds):
    assert bounds.dtype == torch.int32
    assert bounds.device.type == "cpu", "reading them from a device would wait for it"
    assert bounds[0] == 0
    return (bounds[1:] - bounds[:-1]).tolist()


class Ragged(Wrapper):
    """Follows the documentation of `BatchPrefillWithRaggedKVCacheWrapper`, on the host."""

    buffers = ("kv_indptr_buf",)

    def plan(self, starts, key_starts, *heads, **options):
        assert torch.equal(starts, key_starts)
        self.lengths = lengths_between(starts)
        self.keep(*heads, **options)
        self.log.append("plan")

    def run(self, q, k, v):
        assert (q.shape[1], k.shape[1], q.shape[2], q.dtype) == self.expected
        assert len(q) == sum(self.lengths)
        self.log.append([(part.data_ptr(), part.stride()) for part in (q, k, v)])
        return self.attend(q, k.split(self.lengths), v.split(self.lengths))[0]


class Paged(Wrapper):
    """Follows the documentation of `BatchPrefillWithPagedKVCacheWrapper`, on the host.

    What a plan says of pages is read when it runs, from the buffer that it has for them.
    """

    buffers = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")

    def plan(
        self, starts, page_starts, pages, in_last, heads, kv_heads, head_dim, page_size, *, seq_lens=None, **options
    ):
        self.lengths, self.num_pages = lengths_between(starts), lengths_between(page_starts)
        assert pages.dtype == in_last.dtype == torch.int32
        assert pages.device.type == in_last.device.type == "cpu"
        assert (len(pages), len(in_last)) == (sum(self.num_pages), len(self.num_pages))
        assert 1 <= int(in_last.min()) <= int(in_last.max()) <= page_size
        if seq_lens is None:
            seq_lens = (page_starts[1:] - page_starts[:-1] - 1) * page_size + in_last
        assert seq_lens.dtype == torch.int32
        assert all(0 < num <= most * page_size for num, most in zip(seq_lens.tolist(), self.num_pages, strict=True))
        self.seen = seq_lens.tolist()
        if self.captured:
            buffer = self.kept["paged_kv_indices_buf"]
            assert pages.data_ptr() == buffer.data_ptr(), "a copy from the host would wait for the prefill"
            assert len(pages) <= len(buffer)
            assert len(self.kept["paged_kv_last_page_len_buf"]) == self.places
            pages = buffer
        self.pages, self.page_size = pages, page_size
        self.keep(heads, kv_heads, head_dim, **options)
        self.log.append("plan pages")

    def run(self, q, cache, *, out, lse=None, return_lse=False):
        keys, values = cache
        assert keys.shape == values.shape
        assert keys.stride() == values.stride(), "the kernel takes one stride for both"
        assert (q.shape[1], keys.shape[2], q.shape[2], q.dtype) == self.expected
        assert keys.dtype == q.dtype
        assert keys.shape[1] == self.page_size
        assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
        self.log.append([(part.data_ptr(), part.stride()) for part in (q, keys, values)])
        pages = self.pages[: sum(self.num_pages)].long().split(self.num_pages)
        prompts = list(zip(pages, self.seen, strict=True))
        read = ([part[pages].flatten(0, 1)[:length] for pages, length in prompts] for part in (keys, values))
        result, sums = self.attend(q, *read)
        out.copy_(result)
        if not return_lse:
            return out
        assert (lse.shape, lse.dtype, lse.is_contiguous()) == (q.shape[:2], torch.float32, True)
        return out, lse.copy_(sums)


class Event:
    log: list

    def __init__(self, device):
        pass

    def synchronize(self):
        self.log.append("wait")

    def record(self):
        self.log.append("record")
