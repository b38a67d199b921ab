"""What the CPU does otherwise than the reference, for speed."""

from __future__ import annotations

from dataclasses import replace

from ....ops import REFERENCE_OPS, PlatformOps
from .linear import cpu_linear_ops
from .search import cpu_search_ops


def cpu_ops() -> PlatformOps:
    """The CPU's operations, chosen once for this machine."""
    linear = cpu_linear_ops()
    return replace(REFERENCE_OPS, linear=linear, search=cpu_search_ops(linear.mm))
