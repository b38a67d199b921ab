"""Key-value cache ops and their meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class KVOps:
    """write(key, value, key_cache, value_cache, slots): stores rows in place."""

    write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """key and value [T, KV, D] go to rows `slots` int64 [T] of the caches [slots, KV, D]; slots are distinct."""
    key_cache.index_copy_(0, slots, key)
    value_cache.index_copy_(0, slots, value)


REFERENCE_KV_OPS = KVOps(write=write)
