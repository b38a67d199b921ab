"""Plain Hugging Face folders: config.json and safetensors, merged into our modules at load and split again at save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..core.errors import CheckpointError, HardwareError
from ..core.files import atomic_path, read_json, write_json
from ..hardware.base.backend import HardwareBackend
from .registry import model_spec
from .spec import Decoder, ModelSpec

_INDEX = "model.safetensors.index.json"


def load_model(folder: str | Path, backend: HardwareBackend, dtype: torch.dtype | None = None) -> Decoder:
    """Builds the folder's model on the backend's device in evaluation mode. dtype None: fp32.

    A missing, unexpected or misshapen weight is a CheckpointError: nothing is loaded by half.
    """
    folder = Path(folder)
    values = read_config(folder)
    spec = model_spec(values, str(folder / "config.json"))
    model = build_model(spec, values, backend, dtype)
    load_weights(model, spec, folder)
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
    spec: ModelSpec, values: dict[str, Any], backend: HardwareBackend, dtype: torch.dtype | None = None
) -> Decoder:
    """An uninitialised model from config values, on the backend's device. Error: `op_dtype_unsupported`."""
    dtype = dtype or torch.float32
    check_dtype(dtype, backend)
    model = spec.build(spec.read_config(values), backend.ops)
    return model.to(device=backend.runtime.device, dtype=dtype)


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


def load_weights(model: torch.nn.Module, spec: ModelSpec, folder: Path) -> None:
    """Copies the folder's safetensors into the model, merging projections by concatenation along the output."""
    targets = hf_views(model, spec)
    missing = set(targets)
    unexpected: list[str] = []
    with torch.no_grad():
        for name, tensor in _tensors(folder):
            if name not in targets:
                # Hugging Face writes the tied head into some checkpoints, equal to the embedding.
                if name != "lm_head.weight":
                    unexpected.append(name)
                continue
            if targets[name].shape != tensor.shape:
                raise CheckpointError(
                    "weight_shape",
                    f"{folder}: {name} has shape {list(tensor.shape)}, config.json asks for {list(targets[name].shape)}.",
                    "Use the config.json that belongs to these weights.",
                )
            if not tensor.isfinite().all():  # such a model ranks nothing, and its answers would be empty without a word
                raise CheckpointError(
                    "weights_not_finite",
                    f"{folder}: {name} has values that are NaN or infinite.",
                    "Train again with a lower learning rate, or restore the file.",
                )
            targets[name].copy_(tensor)
            missing.discard(name)
    if missing or unexpected:
        raise CheckpointError(
            "weights_do_not_fit",
            f"{folder}: {len(missing)} weights missing {sorted(missing)[:3]}, {len(unexpected)} unexpected {unexpected[:3]}.",
            "Use a complete checkpoint of the architecture that config.json names.",
        )


def save_model(model: torch.nn.Module, spec: ModelSpec, folder: str | Path) -> None:
    """Writes config.json and model.safetensors as Hugging Face would, each atomically."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {**spec.write_config(model.config), "torch_dtype": "float32"})
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
            parts = model.get_submodule(owner).parts
            for hf_name, part in zip(spec.merged[module], parameter.data.split(parts), strict=True):
                views[f"model.{prefix}.{hf_name}.{kind}"] = part
        else:
            views[full] = parameter.data
    return views


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
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
            for name in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, weights.get_tensor(name)
