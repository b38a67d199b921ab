"""Writes into the key and value caches through npu_scatter_pa_kv_cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....ops.kv import KVOps, copy_pages, locate
from ....ops.kv import write as reference_write
from ....ops.spec import partial_group


class AscendKV:
    """library: torch_npu."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        """npu_scatter_pa_kv_cache in its plain layout: caches [blocks, block size, KV, D], here one block of all slots.

        The kernel takes contiguous tensors only. A cache that is none cannot be copied for it, so torch writes there.
        """
        if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
            reference_write(key, value, key_cache, value_cache, slots)
            return
        self._library.npu_scatter_pa_kv_cache(
            key.contiguous(),
            value.contiguous(),
            key_cache[None],
            value_cache[None],
            slots.contiguous(),
            cache_mode="Norm",  # the default, PA_NZ, is the layout of tiles
        )


def kv_ops(library: Any) -> KVOps:
    """Page copies are torch's gather and scatter, and rows are located by torch too."""
    return partial_group(KVOps, write=AscendKV(library).write, copy_pages=copy_pages, locate=locate)
