"""Attention of prompts and of the search through npu_fused_infer_attention_score, which takes sequence lengths from the host.

Prompts are padded to one length [R, L, heads, D] (layout BSND), gathered from their pages once for all passes of a search. The
kernel takes pages too (`block_table`), under limits on page sizes, layouts and masks that are not tried without a device. A
captured call becomes a task of the graph (`graph.Capture`), whose lengths are the state `lengths` of `CapturedGraph.update`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...base.attention import (
    AttentionBackend,
    AttentionNeeds,
    AttentionPlan,
    AttentionSupport,
    KeyValueCache,
    PackedLayout,
    SearchAttention,
)
from ...ops import PlatformOps
from .graph import Numbers, current_capture
from .library import load_library

STATE = "lengths"
WHOLE = (
    0  # sparse_mode: the mask is a full one [R, 1, L, L], or none, and then every query sees its request's whole prompt
)
CAUSAL = 2  # sparse_mode: query i sees keys 0…i; the mask is a triangle of this fixed size, whatever the lengths
MASK_SIZE = 2048
Pair = tuple[Tensor, Tensor]


class AscendAttention(AttentionBackend):
    """Inference in 16 bits, without cached prefixes. library: torch_npu, or what stands in for it."""

    support = AttentionSupport(
        head_dims=tuple(range(16, 513, 16)),
        dtypes=(torch.bfloat16, torch.float16),
        platforms=("ascend",),
    )

    def __init__(self, needs: AttentionNeeds, ops: PlatformOps, library: Any = None) -> None:
        super().__init__(needs, ops)
        self.kernel = FusedAttention(load_library() if library is None else library, needs)

    def packed(self, layout: PackedLayout, cache: KeyValueCache | None = None) -> AttentionPlan:
        return PromptPlan(self.kernel, self.ops, layout, cache)

    def search(self, layout: PackedLayout, cache: KeyValueCache, *, width: int, num_kept: int) -> SearchAttention:
        return AscendSearch(self.kernel, layout, cache, num_kept)


class FusedAttention:
    """Calls the kernel, in a task of its own where a capture is under way."""

    def __init__(self, library: Any, needs: AttentionNeeds) -> None:
        self._library = library
        self.needs = needs
        self._causal_mask: Tensor | None = None

    def prompts(self, query: Tensor, key: Tensor, value: Tensor, lengths: PackedLengths, mask: Tensor | None) -> Tensor:
        """query [R, L, H, D], key and value [R, L, KV, D] -> [R, L, H, D], undefined behind each request's length.

        mask: bool [R, 1, L, L], True where a query (row) does not see a key; None: causal.
        """
        if (
            mask is None and query.shape[1] > 1
        ):  # a single query stands at the only key, and its kernel takes no triangle
            return self._run(query, key, value, lengths, self._triangle(query.device), CAUSAL, beams=False)[0]
        return self._run(query, key, value, lengths, mask, WHOLE, beams=False)[0]

    def beams(self, query: Tensor, key: Tensor, value: Tensor, lengths: PackedLengths) -> Pair:
        """query [R, W, H, D] over prompts [R, L, KV, D] -> (attention [R, W, H, D], log-sum-exp fp32 [R, H, W, 1])."""
        return self._run(query, key, value, lengths, None, WHOLE, beams=True)

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: PackedLengths,
        mask: Tensor | None,
        sparse_mode: int,
        *,
        beams: bool,
    ) -> Pair:
        """beams: queries are all real, and their log-sum-exp is asked; else they end where keys do, and it is an fp32 [1]."""
        query = query.contiguous()  # beams' may be views of a fused product; the rest was gathered
        options = {
            "atten_mask": mask,
            "num_heads": query.shape[2],
            "num_key_value_heads": key.shape[2],
            "scale": query.shape[3] ** -0.5,
            "input_layout": "BSND",
            "sparse_mode": sparse_mode,
            "softmax_lse_flag": beams,
        }
        capture = current_capture()
        numbers = {STATE: lengths.on_host(capturing=capture is not None)}

        def of_queries(now: Numbers) -> list[int] | None:
            return None if beams else now[STATE]

        if capture is None:
            return self._library.npu_fused_infer_attention_score(
                query,
                key,
                value,
                actual_seq_lengths=of_queries(numbers),
                actual_seq_lengths_kv=numbers[STATE],
                **options,
            )
        # The workspace is for the largest lengths of these shapes, so later launches of the task fit into it.
        workspace = self._library._npu_fused_infer_attention_score_get_max_workspace(
            query,
            key,
            value,
            actual_seq_lengths=of_queries(numbers),
            actual_seq_lengths_kv=numbers[STATE],
            **options,
        )
        out = torch.empty_like(query)
        lse_shape = (query.shape[0], query.shape[2], query.shape[1], 1) if beams else (1,)
        lse = query.new_empty(lse_shape, dtype=torch.float32)

        def launch(now: Numbers) -> None:
            self._library.npu_fused_infer_attention_score.out(
                query,
                key,
                value,
                actual_seq_lengths=of_queries(now),
                actual_seq_lengths_kv=now[STATE],
                workspace=workspace,
                out=[out, lse],
                **options,
            )

        capture.task(launch, numbers)
        return out, lse

    def _triangle(self, device: torch.device) -> Tensor:
        """bool [2048, 2048], True where a query does not see a key; made in the warm-up, before any capture."""
        if self._causal_mask is None:
            ones = torch.ones((MASK_SIZE, MASK_SIZE), dtype=torch.bool, device=device)
            self._causal_mask = torch.triu(ones, diagonal=1)
        return self._causal_mask


class PackedLengths:
    """Lengths int64 [R] of requests, as the host knows them. longest: at least the longest."""

    def __init__(self, lengths: Tensor, longest: int) -> None:
        self._lengths = lengths
        self._longest = longest
        self._known: list[int] | None = None

    def on_host(self, *, capturing: bool) -> list[int]:
        """Read once for all layers. A capture may not wait for the device: there, the longest stands in until `update`."""
        if capturing and self._lengths.device.type != "cpu":
            return [self._longest] * len(self._lengths)
        if self._known is None:
            self._known = self._lengths.tolist()
        return self._known


class PromptPlan(AttentionPlan):
    """Prompts, packed, each seeing itself; `cache` keeps keys and values."""

    def __init__(
        self, kernel: FusedAttention, ops: PlatformOps, layout: PackedLayout, cache: KeyValueCache | None
    ) -> None:
        self._kernel = kernel
        self._ops = ops
        self._layout = layout
        self._cache = cache
        self._lengths = PackedLengths(layout.lengths, layout.longest)
        self._slots = layout.slots
        self._mask = None if layout.branch is None else branch_mask(layout.branch[layout.padded])

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._cache is not None:
            self._ops.kv.write(key, value, *self._cache.layer(layer), self._slots)
        padded = self._layout.padded
        out = self._kernel.prompts(query[padded], key[padded], value[padded], self._lengths, self._mask)
        return out.flatten(0, 1).index_select(0, self._layout.flat).flatten(1)


def branch_mask(branch: Tensor) -> Tensor:
    """branch int64 [R, L] of each place -> bool [R, 1, L, L], True where a query (row) does not see a key: a later one, or
    one of another branch."""
    place = torch.arange(branch.shape[1], device=branch.device)
    seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    return ~(seen & (place[:, None] >= place))[:, None]


class AscendSearch(SearchAttention):
    """A batch's search: prompts gathered once, and the keys and values of the beams' own tokens, by pass and beam."""

    def __init__(self, kernel: FusedAttention, layout: PackedLayout, cache: KeyValueCache, num_kept: int) -> None:
        self.kernel = kernel
        slots = layout.prompt_slots
        self.num_requests = len(slots)
        self.lengths = PackedLengths(layout.prompt_lengths, layout.longest_prompt)
        layers = range(kernel.needs.num_layers)
        caches = [cache.layer(layer) for layer in layers]
        self.prompt = [(keys[slots], values[slots]) for keys, values in caches]
        self.own: list[list[Pair | None]] = [[None] * num_kept for _ in layers]

    def step(self, ancestors: Tensor, *, last: bool) -> AttentionPlan:
        return BeamPlan(self, ancestors, last=last)


class BeamPlan(AttentionPlan):
    """One pass of a search; its keys and values are kept for later ones, unless it is the last."""

    def __init__(self, search: AscendSearch, ancestors: Tensor, *, last: bool) -> None:
        self._search = search
        self._ancestors = ancestors
        self._last = last

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        search = self._search
        rows, heads, dim = query.shape
        # All beams of a request are queries against one copy of its prompt.
        by_request = query.unflatten(0, (search.num_requests, -1))
        out, lse = search.kernel.beams(by_request, *search.prompt[layer], search.lengths)
        parts = [out.flatten(0, 1).float()]
        scores = [lse.squeeze(-1).transpose(1, 2).flatten(0, 1)]
        group = heads // key.shape[1]
        scaled = query.float() * dim**-0.5
        for own_key, own_value in self._own(layer, key, value):
            scores.append((scaled * own_key.repeat_interleave(group, 1)).sum(-1))
            parts.append(own_value.repeat_interleave(group, 1).float())
        # The prompt counts as one token whose score is its log-sum-exp, so one small softmax merges all parts.
        weights = torch.softmax(torch.stack(scores), 0).unsqueeze(-1)
        merged = (weights * torch.stack(parts)).sum(0)
        return merged.to(query.dtype).reshape(rows, heads * dim)

    def _own(self, layer: int, key: Tensor, value: Tensor) -> list[Pair]:
        """Keys and values [R · W, KV, D] of each token the beams have taken, the new one last; keeps the new one."""
        kept, own = self._search.own[layer], []
        for step, rows in enumerate(self._ancestors.unbind(1)):
            earlier = kept[step]
            assert earlier is not None, f"pass {step} was not kept"
            own.append((earlier[0][rows], earlier[1][rows]))
        if not self._last:
            kept[self._ancestors.shape[1]] = (key, value)
        return [*own, (key, value)]
