"""What the key-value cache may hold: declared once, for every command that serves a model. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..core.config import Settings

KVCacheDtype = Literal["auto", "bf16", "fp8"]

PAGE_SIZE = (
    16  # tokens: what a prefix is reused by; a row of one head's keys is 256 bytes, so larger ones read no faster
)


class KVConfig(Settings):
    """kv_cache_dtype: of keys and values; auto: the activations' own. prefix_cache: whether a beginning that prompts share is
    computed once.

    memory_fraction: share of the device's memory that this process may take; keys and values get what the model leaves of
    it. None: room for the batches that the engine's limits allow. max_length: tokens of the longest prompt; None: what the
    model's positions allow. host_cache_gib: host memory for pages that leave the device; only where the device has a memory
    of its own.
    """

    kv_cache_dtype: KVCacheDtype = "auto"
    prefix_cache: bool = True
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    max_length: int | None = Field(default=None, ge=1)
    host_cache_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
