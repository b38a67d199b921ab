"""What is asked in a measurement: how long the histories are, how many items come back, how much is asked at once. No torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import ConfigError
from ..core.files import read_json
from ..data.prompt import PromptConfig
from ..sid.catalog import Catalog
from ..sid.layout import code_token

_CASE = re.compile(r"(?:(?P<tokens>\d+)|h(?P<items>\d+)):(?P<n>\d+):(?P<loads>\d+(?:,\d+)*)(?::(?P<requests>\d+))?")


@dataclass(frozen=True)
class Case:
    """items: length of each history. n: items that come back. load: the batch, or the clients that ask at once. requests: how
    many are asked, where the case says so."""

    items: int
    n: int
    load: int
    requests: int | None = None


@dataclass(frozen=True, eq=False)
class Target:
    """The folder's catalog and what its prompts cost, read without its weights."""

    path: Path
    catalog: Catalog
    prompt: PromptConfig

    @classmethod
    def read(cls, folder: str | Path, catalog: str | Path | None = None) -> Target:
        """A folder made by `polyrec train` or `polyrec bench make-model`."""
        path = Path(folder)
        facts = path / "polyrec.json"
        prompt = read_json(facts)["prompt"]["config"] if facts.is_file() else {"basket_token": False}
        return cls(path, Catalog.load(catalog or path / "catalog.parquet"), PromptConfig(**prompt))

    @property
    def tokens_per_item(self) -> int:
        return self.catalog.depth + int(self.prompt.basket_token)

    def items_for(self, tokens: int) -> int:
        """The shortest history whose prompt has at least that many tokens."""
        return max(1, -(-(tokens - 1) // self.tokens_per_item))

    def tokens_of(self, items: int) -> int:
        """Tokens of a history's prompt, each item being a basket of its own."""
        return items * self.tokens_per_item + 1

    def cases(self, texts: list[str]) -> list[Case]:
        """TOKENS:N:LOAD,LOAD…[:REQUESTS], or hITEMS for TOKENS. Errors: ConfigError."""
        return [case for text in texts for case in self._cases(text)]

    def _cases(self, text: str) -> Iterator[Case]:
        match = _CASE.fullmatch(text)
        if match is None:
            raise ConfigError(
                "case_invalid",
                f"'{text}' is no case.",
                "Write TOKENS:N:LOADS or hITEMS:N:LOADS, as 2455:50:1,8,32, and :REQUESTS behind it if you like.",
            )
        items = int(match["items"]) if match["items"] else self.items_for(int(match["tokens"]))
        if not 1 <= items <= self.prompt.max_items:
            raise ConfigError(
                "case_out_of_range",
                f"'{text}' asks for histories of {items} items; the model's prompt keeps 1 to {self.prompt.max_items}.",
                "Ask for shorter ones, or make a model with a larger --max-items.",
            )
        n = int(match["n"])
        if not 1 <= n <= len(self.catalog):
            raise ConfigError(
                "case_out_of_range", f"'{text}' asks for {n} of {len(self.catalog)} items.", "Correct the case."
            )
        for load in match["loads"].split(","):
            if int(load) < 1 or match["requests"] == "0":
                raise ConfigError("case_out_of_range", f"'{text}' asks for nothing.", "Correct the case.")
            yield Case(items, n, int(load), int(match["requests"]) if match["requests"] else None)

    def histories(self, num: int, items: int, seed: int) -> list[list[str]]:
        """Random histories of item ids, [num][items]: no two share a prefix that a cache could use."""
        rows = np.random.default_rng(seed).integers(0, len(self.catalog), (num, items))
        return [[self.catalog.item_ids[row] for row in history] for history in rows.tolist()]


def fresh_seed() -> int:
    """A seed that no earlier run had, so that a server's cache holds none of the histories."""
    return int.from_bytes(os.urandom(6), "little")


def fault_of(items: list[tuple[str, str]], n: int, catalog: Catalog) -> str | None:
    """What is wrong with an answer, (item id, SID) best first: not n, one twice, one that is not the catalog's; else None."""
    if len(items) != n:
        return f"{len(items)} items instead of {n}"
    if len({sid for _, sid in items}) != n:
        return "an item comes twice"
    for item_id, sid in items:
        row = catalog.row(item_id)
        if row is None:
            return f"'{item_id}' is not in the catalog"
        expected = "".join(code_token(level, code) for level, code in enumerate(catalog.codes[row].tolist()))
        if sid != expected:
            return f"'{item_id}' came with {sid}, the catalog has {expected}"
    return None


def body_of(history: list[str], n: int) -> bytes:
    """The JSON of POST /v1/recommend."""
    return json.dumps({"history": history, "n": n}).encode()
