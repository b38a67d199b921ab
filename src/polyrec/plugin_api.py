"""What a plugin imports: how to register operations and attention, and the contracts they fulfil. It has its own version.

Names load on first use, so that an entry point's module stays light: only the attention contract and `op_claims` load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .hardware.plugin.declare import API_VERSION, Plugin
from .hardware.plugin.records import register_att_backend, register_ops

if TYPE_CHECKING:
    from .hardware.base.attention import AttentionBackend as AttentionBackend
    from .hardware.base.attention import AttentionNeeds as AttentionNeeds
    from .hardware.base.attention import AttentionPlan as AttentionPlan
    from .hardware.base.attention import AttentionSupport as AttentionSupport
    from .hardware.base.attention import HostPlan as HostPlan
    from .hardware.base.attention import KeyValueCache as KeyValueCache
    from .hardware.base.attention import PackedLayout as PackedLayout
    from .hardware.base.attention import PageTable as PageTable
    from .hardware.base.attention import SearchAttention as SearchAttention
    from .hardware.base.attention import WriteTarget as WriteTarget
    from .hardware.ops.linear import QuantizedRows as QuantizedRows
    from .hardware.ops.spec import op_claims as op_claims

_LATE = {
    "AttentionBackend": "hardware.base.attention",
    "AttentionNeeds": "hardware.base.attention",
    "AttentionPlan": "hardware.base.attention",
    "AttentionSupport": "hardware.base.attention",
    "HostPlan": "hardware.base.attention",
    "KeyValueCache": "hardware.base.attention",
    "PackedLayout": "hardware.base.attention",
    "PageTable": "hardware.base.attention",
    "QuantizedRows": "hardware.ops.linear",
    "SearchAttention": "hardware.base.attention",
    "WriteTarget": "hardware.base.attention",
    "op_claims": "hardware.ops.spec",
}
__all__ = [
    "API_VERSION",
    "AttentionBackend",
    "AttentionNeeds",
    "AttentionPlan",
    "AttentionSupport",
    "HostPlan",
    "KeyValueCache",
    "PackedLayout",
    "PageTable",
    "Plugin",
    "QuantizedRows",
    "SearchAttention",
    "WriteTarget",
    "op_claims",
    "register_att_backend",
    "register_ops",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"{__package__}.{_LATE[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
