"""One row of the table of `polyrec verify`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class VerifyRow:
    """name: what is held against what. measures: name -> value. limits: measure -> the least that it may be.

    basis: what was asked, in words.
    """

    name: str
    measures: dict[str, float]
    limits: dict[str, float]
    basis: str

    @property
    def passed(self) -> bool:
        """Whether every limit is kept; a measure that is no number keeps none."""
        return all(self.measures[name] >= least for name, least in self.limits.items())

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "passed": self.passed}
