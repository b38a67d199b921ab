"""The flags that say what the key-value cache may hold, declared once for every command that serves a model: `@kv_flags`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator

from ..kvcache.options import KVCacheDtype, KVConfig
from .settings_flags import flag, settings_flags


def kv_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the command's parameter `kv` by the flags."""
    return settings_flags(command, "kv", KVConfig, _flags(), "the key-value cache's flags")


def _flags() -> Iterator[inspect.Parameter]:
    own = functools.partial(flag, KVConfig, "Key-value cache")
    yield own("kv_cache_dtype", KVCacheDtype, "Of the cached keys and values; auto: the activations' own.")
    prefix = "Beginnings that prompts share, as of a user who returns, are computed once."
    yield own("prefix_cache", bool, prefix, "--prefix-cache/--no-prefix-cache")
    share = "Share of the device's memory to take at most; else 0.9, where the device has a memory of its own."
    yield own("memory_fraction", float | None, share)
    yield own("max_length", int | None, "Tokens of the longest prompt; else what the model's positions allow.")
    yield own("host_cache_gib", float, "Host memory for pages that leave the device, in GiB.")
