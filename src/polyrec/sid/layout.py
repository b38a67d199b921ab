"""Where the SID tokens stand in a vocabulary. Imports no torch.

Depth S codebooks; level l's code c is the token `<s_X_c>` with X the l-th letter; `<|sid_begin|>` opens a SID and
`<|sid_end|>` closes it. Each level's tokens are contiguous.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..core.errors import CatalogError

BEGIN, END = "<|sid_begin|>", "<|sid_end|>"
_CODE = re.compile(r"<s_([a-z])_(0|[1-9][0-9]*)>")  # one spelling per code: no <s_a_01>


def code_token(level: int, code: int) -> str:
    """The token text of one code: `<s_a_17>`."""
    return f"<s_{string.ascii_lowercase[level]}_{code}>"


def sid_format(depth: int) -> str:
    """`<s_a_%d><s_b_%d>…`, which codes [S] fill."""
    return "".join(f"<s_{letter}_%d>" for letter in string.ascii_lowercase[:depth])


@dataclass(frozen=True)
class SidLayout:
    """codebook_sizes: codes per level. level_starts: token id of code 0 of each level. begin, end: token ids."""

    codebook_sizes: tuple[int, ...]
    level_starts: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def contiguous(cls, codebook_sizes: tuple[int, ...], first_token: int) -> SidLayout:
        """The layout Polyrec writes: levels one after another from `first_token`, then begin and end."""
        starts = np.cumsum([first_token, *codebook_sizes]).tolist()
        return cls(tuple(codebook_sizes), tuple(starts[:-1]), starts[-1], starts[-1] + 1)

    @classmethod
    def from_vocabulary(cls, vocabulary: Mapping[str, int]) -> SidLayout:
        """Reads the layout off a tokenizer's vocabulary (token text -> id), and refuses gaps."""
        levels: dict[int, dict[int, int]] = {}
        for text, token in vocabulary.items():
            if match := _CODE.fullmatch(text):
                levels.setdefault(string.ascii_lowercase.index(match[1]), {})[int(match[2])] = token
        missing = [text for text in (BEGIN, END) if text not in vocabulary]
        if not levels or missing or sorted(levels) != list(range(len(levels))):
            raise CatalogError(
                "sid_tokens_missing",
                f"The tokenizer has {sum(map(len, levels.values()))} SID code tokens on levels {sorted(levels)}"
                + (f" and lacks {', '.join(missing)}." if missing else "."),
                "Use a tokenizer made by `polyrec prepare`, or one with <s_a_0>…, <|sid_begin|> and <|sid_end|>.",
            )
        sizes, starts = [], []
        for level in range(len(levels)):
            codes = levels[level]
            start = codes.get(0, -1)
            if any(codes.get(code) != start + code for code in range(len(codes))):
                raise CatalogError(
                    "sid_tokens_not_contiguous",
                    f"Tokens {code_token(level, 0)}… of level {level + 1} are not contiguous in the tokenizer.",
                    "Add the codes of a level in order, without gaps.",
                )
            sizes.append(len(codes))
            starts.append(start)
        return cls(tuple(sizes), tuple(starts), vocabulary[BEGIN], vocabulary[END])

    @property
    def depth(self) -> int:
        """S, the number of codes of a SID."""
        return len(self.codebook_sizes)

    @property
    def num_tokens(self) -> int:
        """Code tokens of all levels, without begin and end."""
        return sum(self.codebook_sizes)

    def tokens(self, codes: np.ndarray) -> np.ndarray:
        """Codes [..., S] -> token ids int64 [..., S]."""
        return np.asarray(codes, np.int64) + np.array(self.level_starts, np.int64)

    def text(self, codes: np.ndarray) -> str:
        """Codes [S] -> `<s_a_1><s_b_2>…`."""
        return "".join(code_token(level, int(code)) for level, code in enumerate(codes))

    def parse(self, text: str) -> tuple[int, ...] | None:
        """`<s_a_1><s_b_2>…`, with or without begin and end -> codes; None when it is not one whole SID of this layout."""
        text = text.strip().removeprefix(BEGIN).removesuffix(END)
        parts = list(_CODE.finditer(text))
        if len(parts) != self.depth or "".join(part[0] for part in parts) != text:
            return None
        codes = tuple(int(part[2]) for part in parts)
        letters = [string.ascii_lowercase.index(part[1]) for part in parts]
        in_range = all(code < size for code, size in zip(codes, self.codebook_sizes, strict=True))
        return codes if letters == list(range(self.depth)) and in_range else None

    def to_dict(self) -> dict[str, object]:
        """For polyrec.json."""
        return {
            "codebook_sizes": list(self.codebook_sizes),
            "level_starts": list(self.level_starts),
            "begin": self.begin,
            "end": self.end,
        }
