"""What stands beside the weights in a model folder: polyrec.json, the tokenizer, the catalog; and whether they fit.

polyrec.json holds the SID layout, the prompt's settings and digest, and the catalog's fingerprint. A plain Hugging Face folder
has none of it: its layout is read off the tokenizer and its catalog is named by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..core.config import make_settings
from ..core.errors import CheckpointError
from ..core.files import read_json, write_json
from ..data.histories import Kind
from ..data.prompt import PromptConfig
from ..sid.catalog import Catalog
from ..sid.layout import SidLayout
from ..sid.tokenizer import layout_of, load_tokenizer

POLYREC_JSON, PREPARE_JSON, CATALOG = "polyrec.json", "prepare.json", "catalog.parquet"
FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class ModelFolder:
    """Everything of a model folder but its weights. fingerprint: of SID layout and codebooks; None in foreign folders."""

    path: Path
    tokenizer: Tokenizer
    layout: SidLayout
    catalog: Catalog
    prompt: PromptConfig
    kind: Kind
    fingerprint: str | None


def read_folder(path: str | Path, catalog: str | Path | None = None) -> ModelFolder:
    """Reads and cross-checks a model folder; catalog: another catalog.parquet than the folder's."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            "model_folder_missing", f"There is no folder {path}.", "Give a model folder made by `polyrec train`."
        )
    tokenizer = load_tokenizer(path)
    layout = layout_of(tokenizer)
    facts = read_json(path / POLYREC_JSON) if (path / POLYREC_JSON).is_file() else None
    items = Catalog.load(catalog or path / CATALOG)
    _check_catalog(items, layout, Path(catalog or path / CATALOG))
    if facts is None:
        return ModelFolder(path, tokenizer, layout, items, PromptConfig(basket_token=False), "sequence", None)
    _check_complete(facts, path / POLYREC_JSON)
    prompt = make_settings(PromptConfig, facts["prompt"]["config"], str(path / POLYREC_JSON))
    _check_facts(facts, layout, prompt, path)
    if catalog is not None:
        _check_codebooks(Path(catalog), facts["catalog_fingerprint"], path)
    return ModelFolder(path, tokenizer, layout, items, prompt, facts["kind"], facts["catalog_fingerprint"])


def write_facts(
    path: str | Path, layout: SidLayout, prompt: PromptConfig, kind: Kind, fingerprint: str, extra: dict[str, Any]
) -> None:
    """Writes polyrec.json; extra: provenance that is only read by people."""
    facts = {
        "format_version": FORMAT_VERSION,
        "sid_layout": layout.to_dict(),
        "prompt": {"config": prompt.model_dump(), "digest": prompt.digest},
        "kind": kind,
        "catalog_fingerprint": fingerprint,
        **extra,
    }
    write_json(Path(path) / POLYREC_JSON, facts)


def _check_catalog(catalog: Catalog, layout: SidLayout, path: Path) -> None:
    if not len(catalog):
        raise CheckpointError("catalog_empty", f"{path} has no items.", "Use the catalog prepared with this model.")
    lowest, highest = catalog.codes.min(axis=0), catalog.codes.max(axis=0)
    fits = catalog.depth == layout.depth and all(
        low >= 0 and high < size for low, high, size in zip(lowest, highest, layout.codebook_sizes, strict=True)
    )
    if not fits:
        raise CheckpointError(
            "catalog_does_not_fit",
            f"{path}: SIDs of depth {catalog.depth} with codes from {lowest.tolist()} to {highest.tolist()} do not fit the "
            f"model's codebooks {list(layout.codebook_sizes)}.",
            "Use the catalog prepared with this model's codebooks.",
        )


def _check_codebooks(catalog: Path, fingerprint: str, path: Path) -> None:
    """SIDs of other codebooks of the same sizes look alike but mean nothing to the model; the folder that a catalog comes
    from tells which codebooks it has."""
    for name, key in ((PREPARE_JSON, "fingerprint"), (POLYREC_JSON, "catalog_fingerprint")):
        beside = catalog.parent / name
        if beside.is_file() and read_json(beside).get(key) != fingerprint:
            raise CheckpointError(
                "catalog_does_not_fit",
                f"{catalog} was prepared with other codebooks than the model in {path} ({beside} has another fingerprint).",
                "Use a catalog prepared with this model's codebooks.",
            )


def _check_complete(facts: Any, path: Path) -> None:
    """The format's version first: another version may well have other keys."""
    version = facts.get("format_version") if isinstance(facts, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            "format_version",
            f"{path} has format {version}, this Polyrec reads {FORMAT_VERSION}.",
            "Use the Polyrec version that wrote it, or train again.",
        )
    missing = [key for key in ("sid_layout", "prompt", "kind", "catalog_fingerprint") if key not in facts]
    if not missing:
        missing = [f"prompt.{key}" for key in ("config", "digest") if key not in facts["prompt"]]
    if missing:
        raise CheckpointError(
            "facts_incomplete", f"{path} lacks {', '.join(missing)}.", "Restore the file, or train again."
        )


def _check_facts(facts: dict[str, Any], layout: SidLayout, prompt: PromptConfig, path: Path) -> None:
    if facts["sid_layout"] != layout.to_dict():
        raise CheckpointError(
            "layout_differs",
            f"{path}: polyrec.json's SID layout {facts['sid_layout']} is not the tokenizer's {layout.to_dict()}.",
            "Restore the tokenizer that the model was trained with.",
        )
    if facts["prompt"]["digest"] != prompt.digest:
        raise CheckpointError(
            "prompt_differs",
            f"{path}: the prompt of this Polyrec (digest {prompt.digest[:12]}) is not the one the model was trained with "
            f"({facts['prompt']['digest'][:12]}).",
            "Train again, or use the Polyrec version that wrote the model.",
        )
