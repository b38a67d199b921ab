"""What makes large models fit and run fast on an accelerator: the dtype of weights, compiled layers, activations made again.

On the CPU nothing of this is chosen by itself, so that runs there stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch._functorch.config
from torch import nn
from torch.utils._triton import has_triton
from torch.utils.checkpoint import checkpoint

from ..core.errors import TrainingError
from ..hardware.base.backend import HardwareBackend
from ..models.spec import Decoder
from .recipe import Precision

# Below this a step waits for the host's launches, not for arithmetic: neither bf16 nor a compiled layer is worth its start.
LARGE = 100_000_000
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


def compiles_layers(wanted: Literal["auto", "off", "on"], parameters: int, backend: HardwareBackend) -> bool:
    """Whether layers and the optimizer's step are compiled; by itself only where torch's compiler has Triton for the device."""
    worth = backend.capabilities.async_copies and parameters >= LARGE and has_triton()
    return wanted == "on" or (wanted == "auto" and worth)


def prepare_layers(model: Decoder, *, compiled: bool, checkpointed: int) -> None:
    """Changes how the model's layers run while it is trained: compiled, and the first `checkpointed` of them run again in the
    backward pass. Evaluation runs them as they are.

    All layers share one compiled function, which the first step makes. What copies the model, as the running average does,
    copies it before: the new calls belong to these layers.
    """
    layers = cast(nn.ModuleList, model.layers)
    forward = type(layers[0]).forward
    run = _within_memory(torch.compile(forward, dynamic=True)) if compiled else forward
    for number, layer in enumerate(layers):
        if number < checkpointed:
            _replace_forward(layer, lambda *arguments: checkpoint(run, *arguments, use_reentrant=False))
        elif compiled:
            _replace_forward(layer, run)


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
