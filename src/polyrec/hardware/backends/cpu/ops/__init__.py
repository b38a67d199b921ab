"""What the CPU does otherwise than the reference, for speed."""

from __future__ import annotations

from dataclasses import replace

from ....ops import REFERENCE_OPS, PlatformOps
from .linear import cpu_linear_ops


def cpu_ops() -> PlatformOps:
    """The CPU's operations, chosen once for this machine."""
    return replace(REFERENCE_OPS, linear=cpu_linear_ops())
