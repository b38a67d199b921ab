"""`polyrec prepare`: from a cleaned data set to the folder that training starts from.

The folder: prepare.json (what was made, from what, with which versions), interactions.parquet and histories.json,
catalog.parquet, codebooks.safetensors, vectors.npy, tokenizer.json and tokenizer_config.json, sid_report.json and .png.
It appears whole or not at all, and is reused as long as the settings and the data stay the same. Imports no torch.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator
from scipy import sparse
from tokenizers import Tokenizer

from ..core.config import Settings
from ..core.errors import ConfigError, DataError
from ..core.files import atomic_folder, file_digest, read_json, value_digest, write_json
from ..sid import vectors as item_vectors
from ..sid.catalog import Catalog
from ..sid.quantizer import assign_unique, choose_codebook_sizes, code_space, fit_codebooks
from ..sid.report import draw_report, quality_report
from ..sid.tokenizer import build_tokenizer, extend_tokenizer, layout_of, save_tokenizer
from .columns import ColumnMap
from .dataset import Dataset, load_dataset, load_online_retail
from .histories import FIT, TEST, UNUSED, VALIDATION, Histories, known_before
from .interactions import save_histories, to_histories
from .leakage import check_leakage
from .readers import Format
from .splits import Split

PREPARED = "prepare.json"
FORMAT = 1  # of the prepared folder; a folder of another number is made anew
VECTOR_KINDS = ("auto", "text", "cooccurrence", "joined", "sentence-transformers")
STEPS = ("histories", "item vectors", "codebooks", "unique SIDs", "quality report", "files")
SOURCE_FIELDS = {"dataset", "events", "items", "format", "encoding", "time_format", "columns", "strict_data"}
PACKAGES = ("polyrec", "numpy", "scipy", "scikit-learn", "faiss-cpu", "polars", "tokenizers")


class PrepareConfig(Settings):
    """Where the data come from, and how SIDs are made of them.

    vectors: one of VECTOR_KINDS or the path of a .npy, rows in the order of the item table. `auto` joins text and
    co-occurrence where both exist. vectors_from: co-occurrence (and the catalog's counts) from fit events only, or from
    validation events too, for a last fit when nothing is chosen on validation any more.
    validation_from, test_from: where these stages start with the split `time`; by default after 80 and 90 % of the events.
    codebook_sizes: codes per level; by default chosen from the number of items. dim: dimensions per kind of vector.
    window: length of the runs whose events count as together in data without baskets.
    tokenizer: a Hugging Face folder whose tokenizer is extended; by default a small new one is made.
    """

    dataset: Literal["online-retail"] | None = None
    events: str | None = None
    items: str | None = None
    format: Format = "auto"
    encoding: str = "utf-8"
    time_format: str | None = None
    columns: ColumnMap = ColumnMap()
    strict_data: bool = False
    split: Split = "auto"
    validation_from: datetime | None = None
    test_from: datetime | None = None
    vectors: str = "auto"
    sentence_model: str = "sentence-transformers/all-MiniLM-L6-v2"
    vectors_from: Literal["fit", "fit+validation"] = "fit"
    window: int = Field(default=5, ge=2)
    dim: int = Field(default=64, ge=1)
    depth: int = Field(default=3, ge=1, le=26)
    codebook_sizes: tuple[int, ...] | None = None
    seed: int = Field(default=0, ge=0, lt=2**31)
    tokenizer: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _depth_of_sizes(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("codebook_sizes"), list | tuple):
            values = {"depth": len(values["codebook_sizes"])} | values
        return values

    @field_validator("vectors")
    @classmethod
    def _known_vectors(cls, value: str) -> str:
        if value not in VECTOR_KINDS and not value.endswith(".npy"):
            raise ValueError(f"must be one of {', '.join(VECTOR_KINDS)}, or the path of a .npy")
        return value

    @property
    def boundaries(self) -> tuple[int, int] | None:
        """Starts of validation and test, µs since 1970; times without a zone are UTC, as those of the events are."""
        if self.validation_from is None or self.test_from is None:
            return None
        first, second = (
            (time if time.tzinfo else time.replace(tzinfo=timezone.utc))
            for time in (self.validation_from, self.test_from)
        )
        return round(first.timestamp() * 1_000_000), round(second.timestamp() * 1_000_000)

    @model_validator(mode="after")
    def _consistent(self) -> PrepareConfig:
        given = (self.validation_from is not None) + (self.test_from is not None)
        if given == 1 or (given and self.split != "time"):
            raise ConfigError(
                "split_times",
                "validation_from and test_from go together, and with the split 'time'.",
                "Give --split time --validation-from DATE --test-from DATE.",
            )
        if self.codebook_sizes is not None:
            code_space(self.codebook_sizes)
            if len(self.codebook_sizes) != self.depth:
                raise ConfigError(
                    "codebook_sizes",
                    f"{len(self.codebook_sizes)} codebook sizes do not make SIDs of depth {self.depth}.",
                    "Give one size per level, or leave out one of --depth and --codebook-sizes.",
                )
        return self


def load_source(config: PrepareConfig) -> Dataset:
    """The data set that the config names: the bundled one or the user's files."""
    if (config.dataset is None) == (config.events is None):
        raise ConfigError(
            "source_missing" if config.dataset is None else "source_twice",
            "Name exactly one source of events.",
            "Give --events FILE (and --items FILE), or --dataset online-retail.",
        )
    if config.events is None:
        if config.items is not None:
            raise ConfigError("source_twice", "--items goes with --events, not with --dataset.", "Drop one of the two.")
        return load_online_retail(strict=config.strict_data)
    return load_dataset(
        config.events,
        config.items,
        columns=config.columns,
        strict=config.strict_data,
        format=config.format,
        encoding=config.encoding,
        time_format=config.time_format,
    )


def plan(dataset: Dataset, config: PrepareConfig) -> dict[str, Any]:
    """What `prepare` would make, without making it: JSON-able. Settings that cannot work are errors here already."""
    num_items = dataset.items.height
    sizes = config.codebook_sizes or choose_codebook_sizes(num_items, config.depth)
    space = code_space(sizes)
    if space < num_items:
        raise ConfigError(
            "codebook_sizes",
            f"{num_items:,} items need a SID each, but codebooks {tuple(sizes)} have only {space:,}.",
            "Choose larger --codebook-sizes or a greater --depth, or leave both out.",
        )
    _make_tokenizer(config, sizes)
    by_default = "basket" if dataset.kind == "basket" else "leave-one-out"
    with_text = dataset.items["text"].count()
    return {
        "num_events": dataset.events.height,
        "num_users": dataset.events["user"].n_unique(),
        "num_items": num_items,
        "num_items_with_text": with_text,
        "kind": dataset.kind,
        "split": by_default if config.split == "auto" else config.split,
        "vectors": ("joined" if with_text else "cooccurrence") if config.vectors == "auto" else config.vectors,
        "codebook_sizes": list(sizes),
        "code_space": space,
        "tokenizer": f"extended from {config.tokenizer}" if config.tokenizer else "new",
    }


def check_out(out: str | Path) -> None:
    """A ConfigError when `out` is a file or a folder of something else, which must not be replaced."""
    out = Path(out)
    if out.is_file() or (out.is_dir() and not (out / PREPARED).is_file() and any(out.iterdir())):
        raise ConfigError(
            "out_occupied", f"{out} exists and is not a prepared folder.", "Name a new or empty folder with --out."
        )


def is_prepared(dataset: Dataset, out: str | Path, config: PrepareConfig) -> bool:
    """Whether `out` already holds exactly what this data set and config would give."""
    path = Path(out) / PREPARED
    return path.is_file() and read_json(path).get("recipe_digest") == _recipe_digest(dataset, config)


def prepare(
    dataset: Dataset,
    out: str | Path,
    config: PrepareConfig | None = None,
    *,
    force: bool = False,
    on_step: Callable[[str], None] | None = None,
) -> Path:
    """Makes the prepared folder and returns its path; a folder already made from the same is returned as it is.

    force: make it anew all the same. on_step: called with each name of STEPS as it begins.
    Errors: ConfigError when `out` is something else's folder, DataError and CatalogError from the parts.
    """
    config, out = config or PrepareConfig(), Path(out)
    step = on_step or (lambda name: None)
    check_out(out)
    if not force and is_prepared(dataset, out, config):
        return out
    facts = plan(dataset, config)
    step("histories")
    histories = to_histories(dataset, dataset.items["item"].to_list(), config.split, boundaries=config.boundaries)
    known = known_before(histories, "validation" if config.vectors_from == "fit" else "test")
    step("item vectors")
    kind, vectors = make_vectors(dataset, known, config)
    step("codebooks")
    codebooks = fit_codebooks(vectors, tuple(facts["codebook_sizes"]), config.seed)
    step("unique SIDs")
    codes = assign_unique(vectors, codebooks)
    catalog = Catalog(
        item_ids=dataset.items["item"].to_list(),
        codes=codes,
        names=dataset.items["name"].to_list(),
        counts=np.bincount(known.items, minlength=len(codes)),
    )
    tokenizer = _make_tokenizer(config, codebooks.sizes)
    step("quality report")
    report = quality_report(vectors, codebooks, codes, config.seed)
    step("files")
    with atomic_folder(out) as folder:
        save_histories(folder, histories)
        catalog.save(folder / "catalog.parquet")
        codebooks.save(folder / "codebooks.safetensors")
        np.save(folder / "vectors.npy", vectors)
        save_tokenizer(tokenizer, folder, config.tokenizer)
        write_json(folder / "sid_report.json", report)
        draw_report(report, folder / "sid_report.png")
        record = {
            "format": FORMAT,
            "recipe_digest": _recipe_digest(dataset, config),
            "config": config.model_dump(mode="json"),
            "plan": facts | {"vectors": kind, "split_events": _split_counts(histories)},
            "sid_layout": layout_of(tokenizer).to_dict(),
            "fingerprint": Catalog.fingerprint(codebooks.sizes, codebooks.digest()),
            "data_digest": dataset.digest,
            "data_report": dataset.report.to_dict(),
            "leakage": [asdict(notice) for notice in check_leakage(dataset, histories)],
            "versions": _versions(),
        }
        write_json(folder / PREPARED, record)
    return out


def make_vectors(dataset: Dataset, known: Histories, config: PrepareConfig) -> tuple[str, np.ndarray]:
    """The kind that was made ("text", "joined", …, or the path) and the vectors float32 [I, D], rows as in `known`."""
    texts = dataset.items["text"].to_list()
    if config.vectors.endswith(".npy"):
        return config.vectors, item_vectors.load_vectors(config.vectors, known.num_items)
    if config.vectors == "sentence-transformers":
        return config.vectors, item_vectors.sentence_transformer_vectors(texts, config.sentence_model)
    contexts = context_matrix(known, config.window)
    kind = _auto_kind(texts, contexts) if config.vectors == "auto" else config.vectors
    if kind == "text":
        return kind, item_vectors.text_vectors(texts, config.dim, config.seed)
    if kind == "cooccurrence":
        return kind, item_vectors.cooccurrence_vectors(contexts, config.dim, config.seed)
    text = item_vectors.text_vectors(texts, config.dim, config.seed)
    return kind, item_vectors.joined_vectors(text, item_vectors.cooccurrence_vectors(contexts, config.dim, config.seed))


def context_matrix(known: Histories, window: int) -> sparse.csr_matrix:
    """Which items stand together: CSR [B, I] of 0/1, a row per basket, or per run of `window` events of a sequence."""
    if known.kind == "sequence":
        return item_vectors.window_baskets(known.offsets, known.items, known.num_items, window)
    owner = np.repeat(np.arange(known.num_users), np.diff(known.offsets))
    opens = (np.diff(owner, prepend=-1) != 0) | (np.diff(known.baskets, prepend=-1) != 0)
    basket = np.cumsum(opens) - 1
    return item_vectors.baskets_matrix(basket, known.items, int(opens.sum()), known.num_items)


def _auto_kind(texts: list[str | None], contexts: sparse.csr_matrix) -> str:
    has_text = any(text and text.strip() for text in texts)
    has_pairs = contexts.shape[0] > 0 and int(contexts.sum(axis=1).max()) > 1
    if not has_text and not has_pairs:
        raise DataError(
            "nothing_to_vectorise",
            "The items have no text, and no two of them are ever bought or seen together before validation.",
            "Name text columns (--text-column), bring more events, or bring vectors (--vectors FILE.npy).",
        )
    return "joined" if has_text and has_pairs else "text" if has_text else "cooccurrence"


def _make_tokenizer(config: PrepareConfig, sizes: tuple[int, ...]) -> Tokenizer:
    return extend_tokenizer(config.tokenizer, sizes) if config.tokenizer else build_tokenizer(sizes)


def _recipe_digest(dataset: Dataset, config: PrepareConfig) -> str:
    """Of all that the folder depends on; where the data came from is not part of it, what is in them is."""
    recipe = config.model_dump(mode="json", exclude=SOURCE_FIELDS)
    inputs = {"vectors": config.vectors if config.vectors.endswith(".npy") else None}
    inputs["tokenizer"] = f"{config.tokenizer}/tokenizer.json" if config.tokenizer else None
    digests = {name: file_digest(path) for name, path in inputs.items() if path and Path(path).is_file()}
    return value_digest(
        {"format": FORMAT, "polyrec": version("polyrec"), "data": dataset.digest, "recipe": recipe, "inputs": digests}
    )


def _split_counts(histories: Histories) -> dict[str, int]:
    return {
        name: int((histories.split == label).sum())
        for name, label in (("fit", FIT), ("validation", VALIDATION), ("test", TEST), ("unused", UNUSED))
    }


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
