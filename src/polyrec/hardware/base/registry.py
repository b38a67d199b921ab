"""Platforms and attention backends by name. Registering records a class path; nothing is imported until it is chosen. No torch.

Registering is the only step that makes a platform known: flags, `polyrec devices` and `auto` read their names here.
"""

from __future__ import annotations

from typing import Any

from ...core.registry import Registry

_PLATFORMS = Registry("platform")
_ATTENTION = Registry("attention")


def register_platform(name: str, path: str) -> None:
    """Records `module:Class` (a `HardwareBackend` subclass) under the name that the class has as `platform_name`.

    The same claim twice is one; another path for a known name is `platform_taken`.
    """
    _PLATFORMS.register(name, path)


def platform_names() -> list[str]:
    """All registered names; imports nothing."""
    return _PLATFORMS.names()


def platform_path(name: str) -> str:
    """The class path behind a name; an unknown one is `platform_unknown`."""
    return _PLATFORMS.path(name)


def load_platform(name: str) -> Any:
    """Imports what a platform's path names: `platform_unknown`, `platform_import_failed`, `platform_attribute_missing`."""
    return _PLATFORMS.load(name)


def register_attention(name: str, path: str) -> None:
    """Records `module:Class` (an `AttentionBackend` subclass) under a name; plugins use `register_att_backend` instead."""
    _ATTENTION.register(name, path)


def attention_names() -> list[str]:
    """All built-in attention backends; imports nothing."""
    return _ATTENTION.names()


def load_attention(name: str) -> Any:
    """Imports an attention backend's class: `attention_unknown`, `attention_import_failed`, `attention_attribute_missing`."""
    return _ATTENTION.load(name)


register_platform("cpu", "polyrec.hardware.backends.cpu:CpuBackend")
register_platform("nvidia", "polyrec.hardware.backends.cuda_like:NvidiaBackend")
register_platform("metax", "polyrec.hardware.backends.cuda_like.variants:MetaxBackend")
register_platform("rocm", "polyrec.hardware.backends.cuda_like.variants:RocmBackend")
register_platform("musa", "polyrec.hardware.backends.musa:MusaBackend")
register_platform("xpu", "polyrec.hardware.backends.xpu:XpuBackend")
register_platform("ascend", "polyrec.hardware.backends.ascend:AscendBackend")

register_attention("sdpa", "polyrec.attention.sdpa:SdpaAttention")
register_attention("flashinfer", "polyrec.attention.flashinfer:FlashInferAttention")
register_attention("triton", "polyrec.attention.triton:TritonAttention")
