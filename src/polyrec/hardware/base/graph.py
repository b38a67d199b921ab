"""Capture once, replay many times: the contract between the engine's runner and a platform's graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

States = Mapping[str, torch.Tensor]


class CapturedGraph(ABC):
    """A captured function. Its inputs and outputs are fixed buffers that the caller filled and will read."""

    @abstractmethod
    def replay(self) -> Any:
        """Runs the captured work on what the buffers hold now, and returns the captured function's result."""

    @abstractmethod
    def update(self, states: States) -> None:
        """Tells lengths and tables that some platforms freeze into the captured task; a no-op where they are device data."""


class Graph(ABC):
    """A platform's way to capture. budget: how many captured graphs it can hold, None for no limit."""

    @abstractmethod
    def capture(self, function: Callable[[], Any], pool: object | None = None) -> CapturedGraph:
        """Captures one call of `function`, which must not synchronise, allocate on the host, or branch on a tensor's value."""

    @abstractmethod
    def budget(self) -> int | None:
        """How many graphs may still be captured; None when nothing limits them."""
