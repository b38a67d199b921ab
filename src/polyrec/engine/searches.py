"""What the engine is asked and what it answers: cheap to send to another process. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SearchRequest:
    """One search. prompt: token ids int64 [T]. n items of `beam_width` prefixes come back. excluded, allowed: leaf numbers of
    the trie that may not, or alone may, be returned."""

    prompt: np.ndarray
    n: int
    beam_width: int
    excluded: np.ndarray | None = None
    allowed: np.ndarray | None = None


@dataclass(frozen=True)
class SearchResult:
    """Best first. leaves: int64 [<= n] leaf numbers of the trie. scores: fp32, log-probabilities under the engine's rule."""

    leaves: np.ndarray
    scores: np.ndarray
