"""Plain Hugging Face folders: config.json and safetensors, merged into our modules at load and split again at save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..core.errors import CheckpointError, HardwareError
from ..core.files import atomic_path, read_json, write_json
from ..hardware.base.backend import HardwareBackend
from ..hardware.ops.linear import Fp8Rows
from ..hardware.ops.spec import FP8
from ..hardware.table import dtype_name
from ..layers.choices import LayerChoices
from .options import ModelOptions
from .quantization import choose_layers, stored_form
from .registry import model_spec
from .spec import Decoder, ModelSpec

Quantize = Callable[[torch.Tensor], Fp8Rows]
BeforeWeights = Callable[[Decoder], None]
_INDEX = "model.safetensors.index.json"
_SCALE = ".weight_scale"


def load_model(
    folder: str | Path,
    backend: HardwareBackend,
    dtype: torch.dtype | None = None,
    options: ModelOptions | None = None,
    before_weights: BeforeWeights | None = None,
) -> Decoder:
    """Builds the folder's model on the backend's device in evaluation mode, quantised as the options and its config say.

    dtype: instead of the options'. before_weights: sees the model before its weights have memory, and may refuse it.
    A missing, unexpected or misshapen weight is a CheckpointError: nothing is loaded by half.
    Other errors: those of `choose_layers` and `build_model`.
    """
    folder = Path(folder)
    values = read_config(folder)
    spec = model_spec(values, str(folder / "config.json"))
    choices = choose_layers(options or ModelOptions(), values, stored_dtype(folder), backend, dtype)
    model = build_model(spec, values, backend, choices=choices, before_weights=before_weights)
    online = choices.weights != "plain" and stored_form(values) == "plain"
    load_weights(model, spec, folder, backend.ops.linear.quantize_fp8 if online else None)
    return model.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            "config_json_missing", f"{folder} holds no config.json.", "Give a model folder made by `polyrec train`."
        )
    values = read_json(path)
    if not isinstance(values, dict):
        raise CheckpointError(
            "config_json_invalid",
            f"{path} holds a {type(values).__name__}, not a config.",
            "Restore the model's config.",
        )
    return values


def build_model(
    spec: ModelSpec,
    values: dict[str, Any],
    backend: HardwareBackend,
    dtype: torch.dtype | None = None,
    choices: LayerChoices | None = None,
    before_weights: BeforeWeights | None = None,
) -> Decoder:
    """A model from config values on the backend's device; no weight of it is filled yet. before_weights: as in `load_model`.

    choices: without them, plain weights in `dtype` (None: fp32), as training needs. Errors: `op_dtype_unsupported`;
    `checkpoint_quantized` where plain weights are asked of a quantised checkpoint.
    """
    choices = choices or LayerChoices(dtype=dtype or torch.float32)
    if choices.weights == "plain" and stored_form(values) != "plain":
        raise CheckpointError(
            "checkpoint_quantized",
            "The checkpoint's weights are quantised (quantization_config in its config.json); training needs plain ones.",
            "Use the unquantised checkpoint.",
        )
    check_dtype(choices.dtype, backend)
    with torch.device("meta"):  # nothing is allocated, or drawn, that the weights then replace
        model = spec.build(spec.read_config(values), backend.ops, choices)
    if before_weights is not None:
        before_weights(model)
    return model.to_empty(device=backend.runtime.device)


def check_dtype(dtype: torch.dtype, backend: HardwareBackend) -> None:
    """Every operation that a model may use takes its dtype; optional ones (tier X) are asked by the feature that needs them."""
    lacking = [row for row in backend.table.unsupported(dtype) if row.tier != "X"]
    if lacking:
        fields = ", ".join(
            f"{row.field} of {row.source or row.origin} takes {', '.join(row.dtypes)}" for row in lacking
        )
        raise HardwareError(
            "op_dtype_unsupported",
            f"A model in {str(dtype).removeprefix('torch.')} cannot run on platform '{backend.platform_name}': {fields}.",
            "Load the model in a dtype that they take, or leave out the plugins they come from.",
        )


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the folder's embedding, which no checkpoint quantises, from the files' headers."""
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    for weights in _weight_files(folder):
        for name in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
            if name.endswith("embed_tokens.weight"):
                return names.get(weights.get_slice(name).get_dtype(), torch.float32)
    return torch.float32  # loading tells which weight is missing


def load_weights(model: torch.nn.Module, spec: ModelSpec, folder: Path, quantize: Quantize | None = None) -> None:
    """Copies the folder's safetensors into the model, merging projections by concatenation along the output.

    Weights travel to the device as they are stored. e4m3 weights are never quantised anew: they and their scales are used as
    they are. quantize: for a quantised model from plain weights, a scale per output channel.
    """
    views = hf_views(model, spec)
    missing = set(views)
    unexpected: list[str] = []
    with torch.no_grad():
        for stored, tensor in _tensors(folder):
            # Hugging Face says inverse, and multiplies by it all the same.
            name = stored.removesuffix("_inv") if stored.endswith(f"{_SCALE}_inv") else stored
            if name not in views:
                # Hugging Face writes the tied head into some checkpoints, equal to the embedding.
                if name != "lm_head.weight":
                    unexpected.append(stored)
                continue
            tensor = tensor.to(views[name].device)
            if name.endswith(_SCALE):
                tensor = _spread(tensor, views[name])
            _check(stored, tensor, views[name], folder)
            if views[name].dtype == FP8 and tensor.dtype != FP8:
                tensor, scale = _quantized(stored, tensor, quantize, folder)
                views[f"{name}_scale"].copy_(scale)
                missing.discard(f"{name}_scale")
            views[name].copy_(tensor)
            missing.discard(name)
    if missing or unexpected:
        raise CheckpointError(
            "weights_do_not_fit",
            f"{folder}: {len(missing)} weights missing {sorted(missing)[:3]}, {len(unexpected)} unexpected {unexpected[:3]}.",
            "Use a complete checkpoint of the architecture that config.json names.",
        )


def _check(name: str, tensor: torch.Tensor, view: torch.Tensor, folder: Path) -> None:
    """A stored tensor fits its place, and every number of it is one."""
    if view.shape != tensor.shape:
        raise CheckpointError(
            "weight_shape",
            f"{folder}: {name} has shape {list(tensor.shape)}, config.json asks for {list(view.shape)}.",
            "Use the config.json that belongs to these weights.",
        )
    if tensor.dtype == FP8 and view.dtype != FP8:
        raise CheckpointError(
            "quantization_undeclared",
            f"{folder}: {name} is e4m3, and config.json does not say how it was quantised, or leaves it out.",
            "Restore the quantization_config that belongs to these weights.",
        )
    if not _is_finite(tensor):  # such a model ranks nothing, and its answers would be empty without a word
        raise CheckpointError(
            "weights_not_finite",
            f"{folder}: {name} has values that are NaN or infinite.",
            "Train again with a lower learning rate, or restore the file.",
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype == FP8:  # torch does not ask these; e4m3 has no infinity, and NaN is all ones but for the sign
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    return bool(tensor.isfinite().all())


def _quantized(name: str, tensor: torch.Tensor, quantize: Quantize | None, folder: Path) -> Fp8Rows:
    """A plain weight's rows, which are its output channels, as e4m3 with their scales [out, 1]."""
    if quantize is None:
        raise CheckpointError(
            "quantization_mixed",
            f"{folder}: {name} is {dtype_name(tensor.dtype)}, and quantization_config says that such weights are e4m3.",
            "Use a checkpoint whose decoder layers are quantised throughout, or the unquantised one.",
        )
    return quantize(tensor)


def _spread(scale: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """A stored scale in the shape of its place: one for the whole weight stands for each channel, [out] is [out, 1]."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand_as(view)
    return scale[:, None] if scale.dim() == 1 else scale


def save_model(model: torch.nn.Module, spec: ModelSpec, folder: str | Path) -> None:
    """Writes config.json and model.safetensors as Hugging Face would, each atomically."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    write_json(folder / "config.json", {**spec.write_config(model.config), "torch_dtype": dtype})
    tensors = {name: view.detach().cpu().contiguous().clone() for name, view in hf_views(model, spec).items()}
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def hf_views(model: torch.nn.Module, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Hugging Face's weight names -> views into our parameters [out, in] or [D]; merged projections give one view a part."""
    views: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        prefix, _, module = owner.rpartition(".")
        full = name if name.startswith("lm_head.") else f"model.{name}"
        if module in spec.merged:
            merged = model.get_submodule(owner)
            parts = merged.scale_parts if name.endswith(_SCALE) else merged.parts
            for hf_name, part in zip(spec.merged[module], parameter.data.split(parts), strict=True):
                views[f"model.{prefix}.{hf_name}.{kind}"] = part
        else:
            views[full] = parameter.data
    return views


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for weights in _weight_files(folder):
        for name in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
            yield name, weights.get_tensor(name)


def _weight_files(folder: Path) -> Iterator[Any]:
    """The folder's safetensors files, each open while it is used."""
    if (folder / _INDEX).is_file():
        files = sorted(set(read_json(folder / _INDEX)["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    for file in files:
        path = folder / file
        if not path.is_file():
            raise CheckpointError("weights_missing", f"{folder} holds no {file}.", "Complete the model folder.")
        try:
            weights = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(
                "weights_unreadable", f"{path} is damaged or no safetensors file: {error}.", "Restore the file."
            ) from error
        with weights:
            yield weights
