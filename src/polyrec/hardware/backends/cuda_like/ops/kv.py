"""Writes into the caches and copies of pages through Triton kernels, both caches in one launch, converted where they differ;
and where all packed rows belong, in one launch too.

e4m3 pages get the values themselves (their scale is 1), saturated at ±448.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....ops import kv as reference
from ....ops.kv import KVOps, Located
from .launch import kernels, runs_kernel
from .rope import heads_together


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """`KVOps.write`."""
    if not runs_kernel(key, value):
        return reference.write(key, value, key_cache, value_cache, slots)
    key, value = heads_together(key), heads_together(value)
    return kernels("kv").write(key, value, key_cache, value_cache, slots)


def copy_pages(key_cache: Tensor, value_cache: Tensor, source: Tensor, target: Tensor, page_size: int) -> None:
    """`KVOps.copy_pages`: two launches, since a page may be source and target at once."""
    if not runs_kernel(key_cache):
        return reference.copy_pages(key_cache, value_cache, source, target, page_size)
    size = page_size * key_cache.shape[1] * key_cache.shape[2]
    staged = key_cache.new_empty((len(source), size)), value_cache.new_empty((len(source), size))
    return kernels("kv").copy_pages(key_cache, value_cache, source, target, size, staged)


def locate(lengths: Tensor, cached: Tensor | None, pages: Tensor | None, page_size: int, num_tokens: int) -> Located:
    """`KVOps.locate`."""
    if not runs_kernel(lengths):
        return reference.locate(lengths, cached, pages, page_size, num_tokens)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=lengths.device)
    found = Located(positions, torch.empty_like(positions), torch.empty_like(lengths))
    kernels("kv").locate(lengths, cached, pages, page_size, found.positions, found.slots, found.last)
    return found


def kv_ops() -> KVOps:
    """All fields."""
    return replace(reference.REFERENCE_KV_OPS, write=write, copy_pages=copy_pages, locate=locate)
