"""The CPU's graph calls the function: the engine's graph path is the same with and without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...base.graph import CapturedGraph, Graph, States


class CpuCapturedGraph(CapturedGraph):
    """Holds the function; replay calls it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] | None = function

    def replay(self) -> Any:
        assert self._function is not None, "a closed graph is not replayed"
        return self._function()

    def update(self, states: States) -> None:
        """Nothing to do: the function reads its buffers anew."""

    def close(self) -> None:
        self._function = None


class CpuGraph(Graph):
    """Captures nothing, so nothing limits it. Platforms whose torch has no graphs use it too."""

    def new_pool(self) -> object | None:
        return None

    def capture(self, function: Callable[[], Any], pool: object | None = None) -> CapturedGraph:
        return CpuCapturedGraph(function)

    def budget(self) -> int | None:
        return None
