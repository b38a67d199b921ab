"""How many pages of keys and values a device gets, and whether a model fits at all: told in bytes, with the flag that helps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.errors import ConfigError, HardwareError
from ..hardware.base.attention import AttentionNeeds
from ..hardware.base.backend import HardwareBackend
from ..hardware.base.runtime import MemoryInfo
from ..hardware.ops.spec import FP8
from .options import PAGE_SIZE, KVCacheDtype

GIB = 1 << 30


@dataclass(frozen=True)
class KVSize:
    """bytes_per_token = 2 · kv heads · head dim · layers · dtype size. num_pages: page 0, which no prompt gets, counted."""

    bytes_per_token: int
    num_pages: int
    page_size: int
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        """Tokens that prompts can have in it."""
        return (self.num_pages - 1) * self.page_size

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_size * self.bytes_per_token

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.bytes_per_token:,} bytes a token ({name}), {self.num_pages:,} pages of {self.page_size}, "
            f"{self.num_tokens:,} tokens, {self.num_bytes / GIB:.2f} GiB"
        )


def kv_dtype(asked: KVCacheDtype, activations: torch.dtype, backend: HardwareBackend) -> torch.dtype:
    """Errors: `kv_cache_dtype_unsupported` where the platform has no e4m3 tensors."""
    if asked == "auto":
        return activations
    if asked == "bf16":
        return torch.bfloat16
    if not backend.capabilities.fp8:
        raise ConfigError(
            "kv_cache_dtype_unsupported",
            f"Platform '{backend.platform_name}' has no fp8 tensors for keys and values.",
            "Leave --kv-cache-dtype at auto, or choose bf16.",
        )
    return FP8


def bytes_per_token(needs: AttentionNeeds, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * needs.num_kv_heads * needs.head_dim * needs.num_layers * dtype.itemsize


def size_cache(
    per_token: int, dtype: torch.dtype, *, longest: int, wanted: int, fraction: float | None, memory: MemoryInfo
) -> KVSize:
    """longest: tokens of the longest prompt, which must fit. wanted: tokens of the largest batches, which is what the cache
    gets without a fraction; with one, it gets all of that share of the memory that is not in use.

    Errors: `kv_cache_too_small`.
    """
    least = pages_of(longest) + 1
    if fraction is None:
        return KVSize(per_token, max(least, pages_of(wanted) + 1), PAGE_SIZE, dtype)
    room = room_of(memory, fraction)
    num_pages = max(room, 0) // (per_token * PAGE_SIZE)
    if num_pages < least:
        raise _too_small("Keys and values of one prompt", least * PAGE_SIZE * per_token, longest, memory, fraction)
    return KVSize(per_token, num_pages, PAGE_SIZE, dtype)


def refuse_too_large(weights: int, per_token: int, *, longest: int, fraction: float | None, memory: MemoryInfo) -> None:
    """Before anything is loaded: weights (bytes), and keys and values of one longest prompt, must fit: `kv_cache_too_small`."""
    needed = weights + (pages_of(longest) + 1) * PAGE_SIZE * per_token
    if needed > room_of(memory, fraction or 1.0):
        what = f"Weights ({weights:,} bytes) and keys and values of one prompt"
        raise _too_small(what, needed, longest, memory, fraction or 1.0)


def room_of(memory: MemoryInfo, fraction: float) -> int:
    """Bytes of the share that are not in use, by whomever."""
    return int(memory.total * fraction) - (memory.total - memory.free)


def pages_of(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


def _too_small(what: str, needed: int, longest: int, memory: MemoryInfo, fraction: float) -> HardwareError:
    return HardwareError(
        "kv_cache_too_small",
        f"{what} of {longest:,} tokens need {needed:,} bytes; of the device's {memory.total:,}, {memory.free:,} are free and "
        f"{max(room_of(memory, fraction), 0):,} of them may be taken at --memory-fraction {fraction:g}.",
        "Lower --max-length, choose --kv-cache-dtype fp8 or --quantization fp8, raise --memory-fraction, or free the device.",
    )
