"""Polyrec trains and serves generative recommenders on any accelerator. Public names load on first use, torch with them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Recommender": "polyrec.engine.recommender",
    "Recommendation": "polyrec.core.request",
    "RecommendRequest": "polyrec.core.request",
    "PolyrecError": "polyrec.core.errors",
}
__all__ = ["PolyrecError", "RecommendRequest", "Recommendation", "Recommender", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'polyrec' has no attribute '{name}'")
