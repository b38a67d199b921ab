"""A Hugging Face checkpoint folder with more tokens: longer embedding and head, everything else byte for byte.

Only the shards that hold the embedding or the head are read and rewritten, one at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..core.errors import CheckpointError
from ..core.files import atomic_folder, read_json, write_json
from ..core.vocabulary import padded_vocab_size

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors"}
_NOISE = 0.1  # of the old rows' spread: enough to tell new tokens apart, small beside what separates trained ones


def extend_checkpoint(
    source: str | Path,
    out: str | Path,
    num_tokens: int,
    init: torch.Tensor | None = None,
    seed: int = 0,
    first_new: int | None = None,
) -> Path:
    """Writes `out`: the checkpoint of `source` with rows for `num_tokens`, padded to a multiple of 256, never fewer.

    first_new: the first token id that the old tokenizer lacked (default: the old number of rows). Rows from there on
        are made anew, also where the checkpoint kept spare ones; rows before it, and so their logits, do not change.
    init: [K, hidden], embedding rows of the last K tokens, ids num_tokens − K … num_tokens − 1, all new.
    Other new rows are the mean of the old ones plus a little seeded noise, in an untied head too. Tied stays tied.
    The folder is complete or absent. CheckpointError when `source` is no safetensors checkpoint or `out` is not empty.
    """
    source, out = Path(source), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError("output_exists", f"{out} already holds something.", "Choose another output folder.")
    config = _read_config(source)
    files = weight_files(source)
    embedding = _embedding_name(files, source)
    tied = bool(config["tie_word_embeddings"]) if "tie_word_embeddings" in config else HEAD not in files
    old_rows = int(config["vocab_size"])
    first_new = old_rows if first_new is None else first_new
    new_rows = padded_vocab_size(max(num_tokens, old_rows))
    _check_request(num_tokens, first_new, old_rows, init)

    with atomic_folder(out) as folder:
        grown: list[tuple[int, int]] = []  # (parameters, bytes) that each extended tensor gained
        for name in sorted(set(files.values())):
            tensors, metadata = _read_shard(source / name, wanted={embedding, HEAD})
            if not tensors:
                shutil.copyfile(source / name, folder / name)
                continue
            for key in tensors.keys() & {embedding, HEAD}:
                old = tensors[key]
                _check_rows(key, old, old_rows)
                # A tied head may be stored all the same; drawn like the embedding it stays equal to it.
                rows, draw = (init, seed) if key == embedding or tied else (None, seed + 1)
                tensors[key] = extended_rows(old, new_rows, first_new, num_tokens, rows, draw)
                gained = tensors[key].numel() - old.numel()
                grown.append((gained, gained * old.element_size()))
            save_file(tensors, folder / name, metadata)
        _copy_companions(source, folder)
        if (source / INDEX).is_file():
            write_json(folder / INDEX, _grown_index(read_json(source / INDEX), grown))
        write_json(folder / "config.json", config | {"vocab_size": new_rows})
    return out


def extended_rows(
    old: torch.Tensor, new_rows: int, first_new: int, num_tokens: int, init: torch.Tensor | None, seed: int
) -> torch.Tensor:
    """old [V, hidden] -> [new_rows, hidden] of its dtype: from `first_new` on new, `init` ends at `num_tokens`."""
    kept = old[:first_new].float()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(new_rows - first_new, old.shape[1], generator=generator)
    fresh = kept.mean(0) + _NOISE * kept.std(0, correction=0) * noise
    if init is not None:
        end = num_tokens - first_new
        fresh[end - len(init) : end] = init.float()
    return torch.cat([old[:first_new], fresh.to(old.dtype)])


def weight_files(folder: str | Path) -> dict[str, str]:
    """Tensor name -> file name of a safetensors checkpoint, sharded or not."""
    folder = Path(folder)
    if (folder / INDEX).is_file():
        files: dict[str, str] = read_json(folder / INDEX).get("weight_map", {})
    elif (folder / SINGLE).is_file():
        with _opened(folder / SINGLE) as stream:
            files = dict.fromkeys(stream.keys(), SINGLE)
    else:
        files = {}
    absent = sorted({name for name in files.values() if not (folder / name).is_file()})
    if absent or not files:
        raise CheckpointError(
            "weights_missing",
            f"{folder} lacks {', '.join(absent) or f'{SINGLE} and {INDEX}'}.",
            "Use a complete checkpoint in the safetensors format.",
        )
    return files


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError("weights_unreadable", f"{path}: {error}.", "Fetch the file anew.") from error


def _read_shard(path: Path, wanted: set[str]) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """All tensors of a file that holds any of `wanted`, else none."""
    with _opened(path) as stream:
        names = stream.keys()
        found = not wanted.isdisjoint(names)
        return ({name: stream.get_tensor(name) for name in names} if found else {}), stream.metadata()


def _read_config(source: Path) -> dict[str, Any]:
    config = read_json(source / "config.json") if (source / "config.json").is_file() else {}
    if "vocab_size" not in config:
        raise CheckpointError(
            "config_incomplete",
            f"{source} has no config.json with a vocab_size.",
            "Use a folder of a text model as transformers saves it.",
        )
    return config


def _embedding_name(names: Iterable[str], source: Path) -> str:
    found = [name for name in names if name.endswith(EMBEDDING)]
    if len(found) != 1:
        raise CheckpointError(
            "embedding_not_found",
            f"{source} has {len(found)} tensors named …{EMBEDDING}, expected one.",
            "Use a decoder-only text model.",
        )
    return found[0]


def _check_request(num_tokens: int, first_new: int, old_rows: int, init: torch.Tensor | None) -> None:
    num_new = num_tokens - first_new
    if num_new < 0 or not 0 < first_new <= old_rows or (init is not None and len(init) > num_new):
        given = "no" if init is None else len(init)
        raise CheckpointError(
            "extension_invalid",
            f"{num_tokens} tokens, new from {first_new}, {given} given vectors, {old_rows} old rows: they do not fit.",
            "Give the size of the extended tokenizer, and at most one vector for each new token.",
        )


def _check_rows(name: str, tensor: torch.Tensor, rows: int) -> None:
    if tensor.shape[0] != rows or not tensor.is_floating_point():
        raise CheckpointError(
            "checkpoint_mismatch",
            f"{name} is {tensor.dtype} with {tensor.shape[0]} rows, config.json says vocab_size {rows}.",
            "Use an unquantised folder whose config.json and weights belong together.",
        )


def _copy_companions(source: Path, folder: Path) -> None:
    """Tokenizer, chat template, generation config, licence, …: every other file that holds no weights."""
    for path in sorted(source.iterdir()):
        ours = path.name in (INDEX, "config.json") or (folder / path.name).exists()
        if path.is_file() and not ours and not path.name.startswith(".") and path.suffix not in _OTHER_WEIGHTS:
            shutil.copyfile(path, folder / path.name)


def _grown_index(index: dict[str, Any], grown: list[tuple[int, int]]) -> dict[str, Any]:
    metadata = dict(index.get("metadata", {}))
    for position, key in enumerate(("total_parameters", "total_size")):
        if key in metadata:
            metadata[key] += sum(gain[position] for gain in grown)
    return index | {"metadata": metadata}
