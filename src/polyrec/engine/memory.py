"""What an engine keeps of prompts on the device: the pool of keys and values, and which prompt has which of its pages."""

from __future__ import annotations

from ..core.errors import ConfigError
from ..hardware.base.attention import AttentionBackend
from ..hardware.base.backend import HardwareBackend
from ..kvcache.host_tier import HostTier
from ..kvcache.options import KVConfig
from ..kvcache.pool import KVPool
from ..kvcache.prefix import PrefixCache
from ..kvcache.sizing import GIB, KVSize, bytes_per_token, kv_dtype, pages_of, refuse_too_large, size_cache
from ..models.spec import Decoder


class PromptMemory:
    """depth: levels of a SID, whose positions prompts must leave free. batch_tokens: prompt tokens of the largest batch.

    max_prompt: tokens of the longest prompt that is taken. size: of the pool. Errors: `kv_cache_too_small`,
    `kv_cache_dtype_unsupported`, `max_length_too_long`.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        backend: HardwareBackend,
        config: KVConfig,
        *,
        depth: int,
        batch_tokens: int,
    ) -> None:
        needs, device = attention.needs, model.head_weight.device
        self.max_prompt = longest_prompt(model, config, depth)
        dtype = kv_dtype(config.kv_cache_dtype, needs.dtype, backend)
        in_flight = 2 if backend.capabilities.async_copies else 1  # a batch may be launched while another one runs
        backend.runtime.empty_cache()
        self.size: KVSize = size_cache(
            bytes_per_token(needs, dtype),
            dtype,
            longest=self.max_prompt,
            wanted=in_flight * max(batch_tokens, self.max_prompt),
            fraction=config.memory_fraction,
            memory=backend.runtime.memory(),
        )
        slots = self.size.num_pages * self.size.page_size
        shape = (needs.num_layers, slots, needs.num_kv_heads, needs.head_dim)
        self.pool = KVPool(*shape, dtype, device, backend.runtime.zeros)
        reuse = config.prefix_cache and attention.support.prefix
        host_bytes = int(config.host_cache_gib * GIB) if reuse and backend.capabilities.async_copies else 0
        tier = HostTier(self.pool, self.size.page_size, backend.runtime, host_bytes) if host_bytes else None
        self.prefixes = PrefixCache(self.size.num_pages, self.size.page_size, tier, enabled=reuse)
        self._batch_pages = min(pages_of(batch_tokens), self.size.num_pages // 4)

    def make_room(self) -> None:
        """Evicts ahead of need, while the device works: the next batch finds free pages."""
        self.prefixes.make_room(self._batch_pages)


def longest_prompt(model: Decoder, config: KVConfig, depth: int) -> int:
    """Tokens. Errors: `max_length_too_long`."""
    most = model.config.max_position_embeddings - depth
    if config.max_length is not None and config.max_length > most:
        raise ConfigError(
            "max_length_too_long",
            f"Prompts of {config.max_length:,} tokens are more than the model's positions take: {most:,}.",
            f"Give --max-length {most} or less.",
        )
    return config.max_length or most


def check_fits(model: Decoder, backend: HardwareBackend, config: KVConfig, *, depth: int) -> None:
    """For a model whose weights are not there yet: they and one longest prompt must fit the device. The memory of a platform
    that works in the host's is not asked: what the host calls free leaves out what it would give up.

    Errors: those of `PromptMemory`.
    """
    needs = model.attention_needs(model.head_weight.dtype)
    longest, dtype = longest_prompt(model, config, depth), kv_dtype(config.kv_cache_dtype, needs.dtype, backend)
    if backend.capabilities.async_copies:
        refuse_too_large(
            sum(part.numel() * part.element_size() for part in (*model.parameters(), *model.buffers())),
            bytes_per_token(needs, dtype),
            longest=longest,
            fraction=config.memory_fraction,
            memory=backend.runtime.memory(),
        )
