"""A hardware backend: one platform's runtime, graph and ops, composed in its constructor."""

from __future__ import annotations

from typing import ClassVar

from ..ops import PlatformOps
from .graph import Graph
from .runtime import Runtime


class HardwareBackend:
    """Base of every platform. `platform_name` equals the name it is registered under; parts may come from another backend."""

    platform_name: ClassVar[str]

    def __init__(self, *, runtime: Runtime, graph: Graph, ops: PlatformOps) -> None:
        self.runtime = runtime
        self.graph = graph
        self.ops = ops
