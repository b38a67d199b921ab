"""What a run reads from a prepared folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..core.errors import DataError
from ..core.files import read_json
from ..data.histories import Histories
from ..data.interactions import load_histories
from ..sid.catalog import Catalog
from ..sid.layout import SidLayout
from ..sid.quantizer import Codebooks
from ..sid.tokenizer import layout_of, load_tokenizer


@dataclass(frozen=True, eq=False)
class PreparedData:
    """A prepared folder in memory. facts: its prepare.json."""

    path: Path
    histories: Histories
    catalog: Catalog
    codebooks: Codebooks
    tokenizer: Tokenizer
    layout: SidLayout
    facts: dict[str, Any]

    @property
    def digest(self) -> str:
        """Of the data and of everything made from them."""
        return self.facts["recipe_digest"]


def read_prepared(path: str | Path) -> PreparedData:
    """Reads a folder made by `polyrec prepare`."""
    path = Path(path)
    if not (path / "prepare.json").is_file():
        raise DataError(
            "not_prepared", f"{path} is no prepared folder: it has no prepare.json.", "Make one with `polyrec prepare`."
        )
    facts = read_json(path / "prepare.json")
    needed = ("recipe_digest", "data_digest", "fingerprint")
    if not isinstance(facts, dict) or any(name not in facts for name in needed):
        raise DataError(
            "prepared_broken", f"{path / 'prepare.json'} lacks {', '.join(needed)}.", "Run `polyrec prepare` again."
        )
    tokenizer = load_tokenizer(path)
    return PreparedData(
        path=path,
        histories=load_histories(path),
        catalog=Catalog.load(path / "catalog.parquet"),
        codebooks=Codebooks.load(path / "codebooks.safetensors"),
        tokenizer=tokenizer,
        layout=layout_of(tokenizer),
        facts=facts,
    )
