"""What the engine is asked and what it answers: cheap to send to another process. Imports no torch.

Arrays are pickled as their bytes, in half the time that numpy takes for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

    def __reduce__(self) -> tuple[Callable[..., SearchRequest], tuple[Any, ...]]:
        return SearchRequest.of_plain, self.plain()

    def plain(self) -> tuple[Any, ...]:
        """What `of_plain` takes: in most requests nothing but bytes and numbers."""
        return _bytes(self.prompt, np.int64), self.n, self.beam_width, self.excluded, self.allowed

    @classmethod
    def of_plain(cls, prompt: bytearray, *rest: Any) -> SearchRequest:
        """From `plain`'s values."""
        return cls(np.frombuffer(prompt, np.int64), *rest)


@dataclass(frozen=True)
class SearchResult:
    """Best first. leaves: int64 [<= n] leaf numbers of the trie. scores: fp32, log-probabilities under the engine's rule."""

    leaves: np.ndarray
    scores: np.ndarray

    def __reduce__(self) -> tuple[Callable[..., SearchResult], tuple[Any, ...]]:
        return SearchResult.of_plain, self.plain()

    def plain(self) -> tuple[bytearray, bytearray]:
        """What `of_plain` takes."""
        return _bytes(self.leaves, np.int64), _bytes(self.scores, np.float32)

    @classmethod
    def of_plain(cls, leaves: bytearray, scores: bytearray) -> SearchResult:
        """From `plain`'s values."""
        return cls(np.frombuffer(leaves, np.int64), np.frombuffer(scores, np.float32))


def _bytes(array: np.ndarray, dtype: type[np.generic]) -> bytearray:
    """An array made of a bytearray can be written to, as torch wants those whose memory it shares."""
    return bytearray(np.ascontiguousarray(array, dtype))
