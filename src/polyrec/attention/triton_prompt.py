"""How query rows read prompts that lie in a cache: a prompt's last tokens in a prefill, and a request's beams in a search."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from ..hardware.backends.cuda_like.kernels.early import early
from ..hardware.base.attention import AttentionNeeds, HeadRotation, KeyValueCache, PackedLayout
from ..hardware.ops.linear import QuantizedRows
from ..hardware.ops.spec import FP8
from . import triton_kernels as kernels
from . import triton_merge
from .triton_work import MOST_ITEMS, list_work

# Keys of the smallest span that a prompt is cut into, where its query rows fit one tile; twice that where they do not. Of
# beams' sizes 64 was the fastest measured on an H200 for a request alone: 7.6 us a layer at 305 keys and 50 beams, 12 with 256.
LEAST_OF_REST = 128
LEAST_OF_BEAMS = 64
KEYS = 64  # of a block
PROGRAMS = 256  # that read prompts: two on each multiprocessor of an H200; each takes its share of what there is
QUANTIZED_AT_ONCE = 4096  # values of one program that quantises a row
JOINED_AT_ONCE = 16  # heads of one program that joins own tokens: 16 numbers of each tensor a thread


class OwnTokens(NamedTuple):
    """key, value [rows, kv heads, D] of beams' new tokens; suffix_keys, suffix_values [passes, rows, kv heads, D] of their
    earlier ones, which ancestors int64 [rows, passes so far] finds. rotation: what is still to be done to queries and new keys,
    which are as they leave the product; the new ones then go to the suffix too, if it has room for this pass."""

    key: Tensor
    value: Tensor
    suffix_keys: Tensor
    suffix_values: Tensor
    ancestors: Tensor
    rotation: HeadRotation | None = None


class BeamReader(Protocol):
    """How the beams of a search, all of one width, read their prompts."""

    @property
    def rotates(self) -> bool:
        """Whether `attend` takes own tokens with a rotation."""
        ...

    @property
    def quantizes(self) -> bool:
        """Whether `attend` can quantise."""
        ...

    def attend(self, layer: int, query: Tensor, result: Tensor, own: OwnTokens, into: QuantizedRows | None) -> None:
        """Beams' attention to their prompts and own tokens: query [R · W, heads, D] -> result [R · W, heads · D], or quantised
        `into`."""
        ...


class PromptReader:
    """Query rows against prompts in a cache: the last tokens of each prompt, or with a width each request's beams.

    A prompt is read once for up to 128 rows (queries · heads that share a kv head), and cut into spans where these are few.
    Without a width, prompts of which nothing is cached are left out: their keys are packed, and need no table.
    """

    def __init__(self, needs: AttentionNeeds, layout: PackedLayout, cache: KeyValueCache, width: int = 0) -> None:
        self.needs = needs
        self._cache = cache
        self._width = width
        group = needs.num_heads // needs.num_kv_heads
        # The tile follows the most rows that a request may have. Hopper's matrix units take 64 rows at once, so tiles of 64 and
        # 128 add up alike: a request's neighbours may change one for the other. fp32 has no such units, and one tile. A search
        # has one width.
        rows = (width or layout.longest) * group
        most = 64 if needs.head_dim > 128 or needs.dtype == torch.float32 else 128
        self._tile = next((size for size in ((16, 32, 64) if width else (64,)) if rows <= size), most)
        num_rows = len(layout.lengths) * width or layout.num_tokens
        self.work = work = list_work(
            layout.prompt_lengths if width else layout.lengths,
            num_rows,
            tile=self._tile,
            group=group,
            width=width,
            cached=None if width else layout.cached,
            longest=layout.longest_prompt,
            least=LEAST_OF_BEAMS if width else LEAST_OF_REST,
        )
        device = layout.lengths.device
        if layout.table is None:
            self._place, self._page, self._page_row = (layout.starts, work.count), 0, 0
        else:
            pages = layout.table.pages
            self._place, self._page, self._page_row = (work.count, pages), layout.table.page_size, pages.stride(0)
        part = (work.num_parts, needs.num_heads)
        # One for all layers: they run one after another. Parts are rounded as results are: those that are merged are many, and
        # reading them is most of what merging costs.
        self._part = torch.empty((*part, needs.head_dim), dtype=needs.dtype, device=device)
        self._part_top = torch.empty(part, dtype=torch.float32, device=device)

    @property
    def quantizes(self) -> bool:
        """Whether `attend` can quantise: where prompts may be cut, in the kernel that merges their parts."""
        return quantizes(self.needs) and self.work.max_spans > 1

    @property
    def rotates(self) -> bool:
        """Where prompts may be cut: the kernel that merges their parts then rotates and keeps new keys."""
        return self._width > 0 and self.work.max_spans > 1

    def attend(
        self,
        layer: int,
        query: Tensor,
        result: Tensor,
        own: OwnTokens | None = None,
        into: QuantizedRows | None = None,
    ) -> None:
        """query [T, heads, D] -> result [T, heads · D], with beams' own tokens. into: all rows of the result, those that others
        have written among them, go there quantised."""
        self._read(layer, query, result, own)
        self._merge(query, result, own, into)

    def _read(self, layer: int, query: Tensor, result: Tensor, own: OwnTokens | None) -> None:
        """Where nothing may be cut, and of prompts' last tokens what is not, rows of the result; others wait for `_merge`."""
        needs, work, tensors = self.needs, self.work, self._tensors(query, own)
        rotation = tensors.rotation or no_rotation(query)
        num_programs = min(work.max_items, max(1, PROGRAMS // needs.num_kv_heads))
        kernels.prompt_kernel[(num_programs, needs.num_kv_heads)](
            query, *self._cache.layer(layer), result, work.items, work.count, *self._place,
            self._part, self._part_top, *tensors[:5], rotation.query_weight, rotation.cos, rotation.sin,
            self._page_row, *own_strides(tensors), needs.sliding_window or 0, rotation.eps, *common(needs, query),
            **self._sizes(own), ROTATE=tensors.rotation is not None, ROWS=self._tile, KEYS=KEYS, PAGE=self._page,
            CUT=work.max_spans > 1, num_warps=8 if self._tile > 64 or needs.head_dim > 128 else 4,
            num_stages=num_stages(query), **early(),
        )  # fmt: skip

    def _merge(self, query: Tensor, result: Tensor, own: OwnTokens | None, into: QuantizedRows | None) -> None:
        work, needs, heads = self.work, self.needs, self.needs.num_heads
        if work.max_spans == 1:
            assert into is None, "nothing is merged"
            return
        # A prefill's most spans are the same for every batch: others might add in another order, and a row's last bits follow
        # its neighbours. Registers for spans that cannot be would keep programs from running at once. Small blocks make many
        # programs, each one warp; a row's scale is known to who has all of it.
        most = triton.next_power_of_2(work.max_spans) if self._width else MOST_ITEMS
        block, warps = min(2, triton.next_power_of_2(heads)), 1
        if into is not None:
            block = triton.next_power_of_2(heads)
            warps = max(1, min(8 if most > 8 else 4, heads * needs.head_dim // 256))
        quantized = into or QuantizedRows(result, result)
        key, value, *others, turned = tensors = self._tensors(query, own)
        rotation = turned or no_rotation(query)
        triton_merge.merge_kernel[(len(query), triton.cdiv(heads, block))](
            query, key, value, self._part, self._part_top, work.requests, work.owner,
            *others, *rotation[:4], result, *quantized, self._width, work.max_spans, *own_strides(tensors),
            needs.sliding_window or 0, rotation.eps, *common(needs, query), **self._sizes(own),
            BLOCK=block, MOST=most, QUANTIZED=into is not None, ROTATE=turned is not None,
            KEEP=own is not None and turned is not None and own.ancestors.shape[1] < len(own.suffix_keys),
            num_warps=warps, **early(),
        )  # fmt: skip

    def _tensors(self, query: Tensor, own: OwnTokens | None) -> OwnTokens:
        """Where there are no own tokens, tensors that are not read."""
        return own or OwnTokens(query, query, query, query, self.work.owner)

    def _sizes(self, own: OwnTokens | None) -> dict[str, int | bool]:
        return {**sizes(self.needs, own), "WINDOWED": self.needs.sliding_window is not None}


def quantizes(needs: AttentionNeeds) -> bool:
    """Whether results are to be quantised, where one program has all heads of a row anyway, or may have."""
    return needs.quantized and needs.num_heads * needs.head_dim <= QUANTIZED_AT_ONCE


def num_stages(query: Tensor) -> int:
    """Blocks of keys and values under way at once: as many as fit beside the queries, three at most."""
    return {256: 3, 512: 2}.get(max(256, query.shape[2] * query.element_size()), 1)


def no_rotation(query: Tensor) -> HeadRotation:
    """Tensors that are not read."""
    return HeadRotation(query, query, query, query, 0.0)


def room_for_quantized(query: Tensor) -> QuantizedRows:
    """Of attention's results for query [T, heads, D]: uninitialised."""
    values = query.new_empty((len(query), query.shape[1] * query.shape[2]), dtype=FP8)
    return QuantizedRows(values, query.new_empty((len(query), 1), dtype=torch.float32))


def join_own(
    needs: AttentionNeeds,
    query: Tensor,
    top: Tensor,
    result: Tensor,
    own: OwnTokens,
    into: QuantizedRows | None = None,
) -> None:
    """Beams' own tokens into the result [rows, heads · D] of their prompts alone, in place, or quantised `into`. query [rows,
    heads, D]; top: fp32 [rows, heads], the logarithm of each softmax's sum in base 2. No sliding windows."""
    assert needs.sliding_window is None, "a window would hide tokens of the prompt, or own ones"
    block = triton.next_power_of_2(needs.num_heads)
    if into is None:
        block = min(JOINED_AT_ONCE, block)
    key, value, *others, rotation = own
    assert rotation is None, "rotated by then"
    quantized = into or QuantizedRows(result, result)
    triton_merge.join_own_kernel[(len(query), triton.cdiv(needs.num_heads, block))](
        query, key, value, top, *others, result, *quantized, *own_strides(own), *common(needs, query),
        **sizes(needs, own), BLOCK=block, QUANTIZED=into is not None,
        num_warps=max(1, min(8, block * needs.head_dim // 512)), **early(),
    )  # fmt: skip


def own_strides(own: OwnTokens) -> tuple[int, ...]:
    """Rows of a pass's suffix, and the strides of the new keys and values."""
    return own.suffix_keys.shape[-3], *own.key.stride()[:2], *own.value.stride()[:2]


def common(needs: AttentionNeeds, query: Tensor) -> tuple[float, ...]:
    """What every kernel here is told last."""
    return needs.head_dim**-0.5, needs.soft_cap or 1.0, *query.stride()[:2]


def sizes(needs: AttentionNeeds, own: OwnTokens | None) -> dict[str, int | bool]:
    return {
        "OWN": 0 if own is None else own.ancestors.shape[1] + 1,
        "HEADS": needs.num_heads,
        "GROUP": needs.num_heads // needs.num_kv_heads,
        "DIM": needs.head_dim,
        "CAPPED": needs.soft_cap is not None,
    }
