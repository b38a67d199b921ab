"""The flags that say how a model runs, declared once for every command that loads one: `@model_flags` fills `options`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator

from ..models.options import Dtype, ModelOptions, Quantization
from .settings_flags import flag, settings_flags


def model_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the command's parameter `options` by the flags."""
    return settings_flags(command, "options", ModelOptions, _flags(), "the model flags")


def _flags() -> Iterator[inspect.Parameter]:
    own = functools.partial(flag, ModelOptions, "Model")
    yield own("dtype", Dtype, "Of activations; auto: the checkpoint's own, float32 on the CPU.")
    quantization = "auto follows the checkpoint's config; fp8 quantises the layers' products at load."
    yield own("quantization", Quantization, quantization)
    for name, text in (
        ("rms_fp8", "Norms before an fp8 product quantise their result themselves."),
        ("silu_fp8", "SwiGLU before an fp8 product quantises its result itself."),
        ("qk_rope_kv", "Norms of query and key, rotation and cache write are one operation."),
    ):
        hyphened = name.replace("_", "-")
        spelling = f"--enable-fused-{hyphened}/--no-fused-{hyphened}"
        yield own(f"enable_fused_{name}", bool, text, spelling)
