"""From a checkpoint's config, the options and the platform to the form its model is built in.

Whether a checkpoint is quantised is what its `quantization_config` says: neither its folder's name nor anything else.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..core.errors import CheckpointError, HardwareError
from ..hardware.base.backend import HardwareBackend
from ..hardware.ops.linear import BLOCK
from ..hardware.table import dtype_name, fuses, is_replaced
from ..layers.choices import LayerChoices, WeightForm
from .options import ModelOptions

FIELDS: dict[WeightForm, tuple[str, ...]] = {
    "plain": (),
    "fp8": ("linear.quantize_fp8", "linear.scaled_mm"),
    "fp8_blocks": ("linear.quantize_fp8_blocks", "linear.block_scaled_mm"),
}
_log = logging.getLogger("polyrec.models")


def choose_layers(
    options: ModelOptions,
    values: dict[str, Any],
    stored_dtype: torch.dtype,
    backend: HardwareBackend,
    dtype: torch.dtype | None = None,
) -> LayerChoices:
    """values: the checkpoint's config. stored_dtype: of its weights that are not quantised. dtype: instead of the options'.

    Errors: `checkpoint_quantized`, `quantization_unsupported`, `fp8_unavailable`. Warning: `fp8_slow`.
    """
    stored = stored_form(values)
    if options.quantization == "none" and stored != "plain":
        raise CheckpointError(
            "checkpoint_quantized",
            "--quantization none was asked for, and config.json's quantization_config says that the weights are quantised.",
            "Leave --quantization at auto, or use the unquantised checkpoint.",
        )
    form = "fp8" if options.quantization == "fp8" and stored == "plain" else stored
    chosen = dtype or _dtype(options, stored_dtype, backend, form)
    _check_operations(form, chosen, backend)
    return LayerChoices(
        dtype=chosen,
        weights=form,
        fused_rms_fp8=options.enable_fused_rms_fp8,
        fused_mm_rms_fp8=fuses(backend.table, "norm.mm_add_rms_norm_fp8"),
        fused_silu_fp8=options.enable_fused_silu_fp8,
        fused_qk_rope_kv=options.enable_fused_qk_rope_kv,
        rope_is_replaced=any(is_replaced(backend.table, field) for field in ROTATIONS),
    )


# What attention does itself where its kernels can.
ROTATIONS = ("rope.qk_norm_rotary", "rope.qk_norm_rotary_store", "rope.rotary_store")


def stored_form(values: dict[str, Any]) -> WeightForm:
    """How a checkpoint with this config stores the weights of its layers' products. Error: `quantization_unsupported`."""
    given = values.get("quantization_config")
    if given is None:
        return "plain"
    method = given.get("quant_method")
    if method == "fp8" and given.get("activation_scheme", "dynamic") == "dynamic":
        return _form_of_blocks(given.get("weight_block_size"), "weight_block_size")
    if method == "fbgemm_fp8":
        return "fp8"
    if method == "compressed-tensors":
        return _form_of_groups(given)
    scheme = f" with activation_scheme '{given['activation_scheme']}'" if given.get("activation_scheme") else ""
    raise _unsupported(f"quant_method '{method}'{scheme}")


def _form_of_groups(given: dict[str, Any]) -> WeightForm:
    """compressed-tensors: one group for all linear layers, e4m3 weights, activations quantised as they come."""
    groups = list((given.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _unsupported(f"compressed-tensors with {len(groups)} config_groups")
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    if weights.get("type") != "float" or weights.get("num_bits") != 8:
        raise _unsupported(f"compressed-tensors of type '{weights.get('type')}' in {weights.get('num_bits')} bits")
    if inputs and not inputs.get("dynamic"):
        raise _unsupported("compressed-tensors with static input_activations")
    if weights.get("strategy") == "block":
        return _form_of_blocks(weights.get("block_structure"), "block_structure")
    if weights.get("strategy") not in ("channel", "tensor"):
        raise _unsupported(f"compressed-tensors with strategy '{weights.get('strategy')}'")
    return "fp8"


def _form_of_blocks(size: list[int] | None, name: str) -> WeightForm:
    if size is None:
        return "fp8"
    if list(size) != [BLOCK, BLOCK]:
        raise _unsupported(f"{name} {list(size)}")
    return "fp8_blocks"


def _unsupported(what: str) -> CheckpointError:
    return CheckpointError(
        "quantization_unsupported",
        f"This checkpoint's quantization_config asks for what is not implemented: {what}.",
        "Use e4m3 weights with scales per channel or per 128 x 128 weights, or the unquantised checkpoint.",
    )


def _dtype(options: ModelOptions, stored_dtype: torch.dtype, backend: HardwareBackend, form: WeightForm) -> torch.dtype:
    """What `auto` stands for here; a stored dtype that the platform does not run becomes fp32."""
    if options.dtype != "auto":
        named: torch.dtype = getattr(torch, options.dtype)
        return named
    if not backend.half_by_default:
        return torch.float32
    wanted = torch.bfloat16 if form != "plain" and stored_dtype == torch.float32 else stored_dtype
    return wanted if wanted in backend.capabilities.dtypes else torch.float32


def _check_operations(form: WeightForm, dtype: torch.dtype, backend: HardwareBackend) -> None:
    rows = [backend.table.row(field) for field in FIELDS[form]]
    lacking = [row.field for row in rows if row.origin == "absent"]
    lacking += [
        f"{row.field} for {dtype_name(dtype)}"
        for row in rows
        if row.origin != "absent" and dtype_name(dtype) not in row.dtypes
    ]
    if lacking:
        raise HardwareError(
            "fp8_unavailable",
            f"The model's products are e4m3, and platform '{backend.platform_name}' has no {', '.join(lacking)}.",
            "Use an unquantised checkpoint (--quantization none), another platform, or a plugin that has them (--extra-ops).",
        )
    if form != "plain" and not backend.capabilities.fp8:
        _log.warning(
            "[fp8_slow] Platform '%s' has no e4m3 products: they are computed in wider numbers, slower than without "
            "quantisation.",
            backend.platform_name,
        )
