"""What makes large models fit and run fast on an accelerator: the dtype of weights, how layers run, activations made again.

On the CPU nothing of this is chosen by itself, so that runs there stay what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch._functorch.config
from torch import nn
from torch.utils._triton import has_triton
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..core.errors import TrainingError
from ..hardware.base.backend import HardwareBackend
from ..hardware.table import fuses
from ..models.spec import Decoder
from .recipe import Precision

LayerForm = Literal["plain", "fused", "compiled"]

# Below this a step waits for the host's launches, not for arithmetic: neither bf16 nor a compiled layer is worth its start.
LARGE = 100_000_000
# What fused layers call, and torch's attention, whose results they keep while all that leads to it is made again.
FUSED = ("norm.add_rms_norm_mm", "act.silu_and_mul_mm", "rope.qkv_norm_rotary")
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
# Of what a compiled layer would keep for its backward pass where only time counted. At this share norms, rotation, SwiGLU and
# attention's forward pass are computed again, and no product of weights is.
MEMORY_SHARE = 0.6


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def weights_dtype(precision: Precision, parameters: int, backend: HardwareBackend) -> torch.dtype:
    """Of weights and activations. Error: `precision_unsupported`."""
    able = backend.capabilities
    if precision == "bf16" and torch.bfloat16 not in able.dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in able.dtypes)
        raise TrainingError(
            "precision_unsupported",
            f"precision is bf16, and platform '{backend.platform_name}' has {names}.",
            "Set precision to auto or fp32.",
        )
    chosen = torch.bfloat16 in able.dtypes and able.async_copies and parameters >= LARGE
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and chosen) else torch.float32


def compiles(wanted: Literal["auto", "off", "on"], parameters: int, backend: HardwareBackend) -> bool:
    """Whether torch compiles anything; by itself only where its compiler has Triton for the device."""
    worth = backend.capabilities.async_copies and parameters >= LARGE and has_triton()
    return wanted == "on" or (wanted == "auto" and worth)


def layer_form(wanted: Literal["auto", "off", "on"], parameters: int, backend: HardwareBackend) -> LayerForm:
    """How layers run while they are trained. fused: through the platform's own operations that keep less, where it has them and
    the model is large; faster than compiled ones on an H200, in less memory, and ready sooner."""
    large = backend.capabilities.async_copies and parameters >= LARGE
    if wanted != "on" and large and keeps_less(backend):
        return "fused"
    return "compiled" if compiles(wanted, parameters, backend) else "plain"


def keeps_less(backend: HardwareBackend) -> bool:
    """Whether the platform has the fused operations with backward passes of their own, and no plugin has a part of them,
    which they would pass over."""
    return all(fuses(backend.table, field) for field in FUSED)


def prepare_layers(model: Decoder, form: LayerForm, *, checkpointed: int) -> None:
    """Changes how the model's layers run while it is trained: in that form, and the first `checkpointed` of them run again in
    the backward pass. Evaluation runs them as they are.

    All layers share one compiled function, which the first step makes. What copies the model, as the running average does,
    copies it before: the new calls belong to these layers.
    """
    layers = cast(Any, model.layers)
    run = type(layers[0]).forward_fused if form == "fused" else type(layers[0]).forward
    if form == "compiled":
        run = _within_memory(torch.compile(run, dynamic=True))
    for number, layer in enumerate(layers):
        if number < checkpointed:
            _replace_forward(layer, lambda *arguments: checkpoint(run, *arguments, use_reentrant=False))
            continue
        if form != "plain":
            _replace_forward(layer, run)
        if form == "fused":
            layer.self_attn.mix_whole = _keeping_attention(layer.self_attn.mix_whole)


def _keeping_attention(mix: Callable[..., Any]) -> Callable[..., Any]:
    """mix: as `Attention.mix_whole`. Of what it computes, only that is kept: normed and turned queries and
    keys are one cheap kernel, and would be a seventh of a layer's memory."""
    names = [f"_scaled_dot_product_{name}" for name in ATTENTION]
    kept = [getattr(torch.ops.aten, name).default for name in names]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)

    def run(*arguments: Any) -> Any:
        # No random numbers are drawn; to keep the generator's state would wait for the device.
        return checkpoint(mix, *arguments, use_reentrant=False, context_fn=contexts, preserve_rng_state=False)

    return run


def _within_memory(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles under MEMORY_SHARE, whenever a call meets a new form of batch."""

    def run(*arguments: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=MEMORY_SHARE):
            return compiled(*arguments)

    return run


def _replace_forward(layer: nn.Module, run: Callable[..., Any]) -> None:
    plain = layer.forward

    def forward(*arguments: Any) -> Any:
        return run(layer, *arguments) if layer.training and torch.is_grad_enabled() else plain(*arguments)

    layer.forward = forward
