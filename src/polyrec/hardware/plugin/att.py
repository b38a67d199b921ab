"""Attention backends from plugins: classes that are complete, and whose names are free."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ...core.errors import HardwareError
from ..attention_choice import PluginAttention
from ..base.attention import AttentionBackend, AttentionSupport
from ..base.config import AUTO
from ..base.registry import attention_names
from .common import Loaded
from .ops import signature_faults
from .source import PluginError, PluginSource

_LISTED: dict[str, type] = {"head_dims": int, "dtypes": torch.dtype, "platforms": str}  # fields of AttentionSupport


def attention_of(plugins: Sequence[Loaded]) -> dict[str, PluginAttention]:
    """Name -> class, with its plugin. Errors: `attention_not_a_backend`, `attention_taken`, `plugin_conflict`."""
    found: dict[str, PluginAttention] = {}
    for plugin in plugins:
        for record in plugin.records:
            _check(plugin.source, record.key, record.value)
            earlier = found.setdefault(record.key, PluginAttention(record.value, str(plugin.source)))
            if earlier.cls is not record.value or earlier.source != str(plugin.source):
                raise HardwareError(
                    "plugin_conflict",
                    f"Attention '{record.key}' is registered by {earlier.source} and by {plugin.source}. "
                    "The order of loading decides nothing.",
                    f"Leave one of them out of --extra-att, such as {plugin.source.name}.",
                )
    return found


def _check(source: PluginSource, name: str, cls: Any) -> None:
    if name == AUTO or name in attention_names():
        raise PluginError(
            "attention_taken",
            source,
            f"registers attention '{name}', which is built in.",
            f"Install a version with another name, or leave out {source.flag}.",
        )
    if fault := _fault(cls):
        raise PluginError(
            "attention_not_a_backend",
            source,
            f"registers {cls!r} as attention '{name}': {fault}.",
            "Complete a subclass of polyrec.plugin_api.AttentionBackend.",
        )


def _fault(cls: Any) -> str:
    """Why it is no attention backend; empty if it is one."""
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        return "it is no subclass of AttentionBackend"
    if inspect.isabstract(cls):
        return f"it lacks {', '.join(sorted(cls.__abstractmethods__))}"
    support = getattr(cls, "support", None)
    if not isinstance(support, AttentionSupport):
        return "it has no `support` that is an AttentionSupport"
    for name, kind in _LISTED.items():
        listed = getattr(support, name)
        if listed is not None and not (isinstance(listed, (tuple, list)) and all(type(one) is kind for one in listed)):
            return f"its `support` has {name}={listed!r}, which is neither None nor a tuple of {kind.__name__}"
    for name in ("packed", "search"):
        if faults := signature_faults(getattr(cls, name), getattr(AttentionBackend, name)):
            return f"`{name}` is not the contract's: {'; '.join(faults)}"
    try:
        inspect.signature(cls).bind("needs", "ops")
    except TypeError as error:
        return f"it cannot be constructed from (needs, ops): {error}"
    return ""
