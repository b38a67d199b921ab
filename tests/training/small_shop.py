"""A small shop: its files, its prepared folder, a model of 16 hidden units, and reading a run's log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from polyrec.data.dataset import ColumnMap, load_dataset
from polyrec.data.prepare import PrepareConfig, prepare

SIZES = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip


def write_shop(folder: Path) -> PrepareConfig:
    """Events and items of 40 customers fond of one kind of thing each; baskets of 1 to 4."""
    rng = np.random.default_rng(0)
    rows = []
    for user in range(40):
        for basket in range(int(rng.integers(3, 7))):
            kind = user % 5 if rng.random() < 0.8 else int(rng.integers(0, 5))
            for item in rng.choice(6, int(rng.integers(1, 5)), replace=False):
                rows.append((f"u{user}", f"i{kind * 6 + item}", 1000 * user + basket, f"b{user}-{basket}"))
    pl.DataFrame(rows, ["user", "item", "time", "basket"], orient="row").write_csv(folder / "events.csv")
    kinds = ["red mug", "blue plate", "paper bag", "tea towel", "glass jar"]
    items = [(f"i{i}", f"{kinds[i // 6]} {i % 6}", kinds[i // 6]) for i in range(30)]
    pl.DataFrame(items, ["item", "name", "text"], orient="row").write_csv(folder / "items.csv")
    return PrepareConfig(events=str(folder / "events.csv"), items=str(folder / "items.csv"), dim=8)


def prepare_shop(folder: Path, **settings: object) -> Path:
    """The prepared folder of that shop."""
    config = PrepareConfig(**{**write_shop(folder).model_dump(), **settings})
    data = load_dataset(folder / "events.csv", folder / "items.csv", columns=ColumnMap())
    return prepare(data, folder / "prepared", config)


def read_log(out: Path) -> list[dict[str, Any]]:
    """The lines of log.jsonl of a run."""
    return [json.loads(line) for line in (out / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
