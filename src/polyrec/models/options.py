"""How a model shall run: what the flags of every command that loads one say. Imports no torch."""

from __future__ import annotations

from typing import Literal

from ..core.config import Settings

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "none", "fp8"]


class ModelOptions(Settings):
    """dtype: of activations and of weights that are not quantised. auto: the checkpoint's own on an accelerator (bf16 where
    an fp32 one is quantised, since quantised products give bf16 there), fp32 on the CPU.

    quantization: auto follows config.json's `quantization_config`; none refuses a quantised checkpoint; fp8 quantises the
    layers' products of any other at load, a scale per output channel.
    enable_fused_rms_fp8, enable_fused_silu_fp8: norms and SwiGLU before a quantised product quantise their result themselves.
    enable_fused_qk_rope_kv: norms of query and key, rotation and cache write are one operation. Off: the operations that
    these are made of, one after another.
    """

    dtype: Dtype = "auto"
    quantization: Quantization = "auto"
    enable_fused_rms_fp8: bool = True
    enable_fused_silu_fp8: bool = True
    enable_fused_qk_rope_kv: bool = True
