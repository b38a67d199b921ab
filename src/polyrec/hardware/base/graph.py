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
        """Runs the captured work on what the buffers hold now, and returns the captured function's result.

        Random draws inside advance the device's default generator as an eager call would.
        """

    @abstractmethod
    def update(self, states: States) -> None:
        """Tells lengths and tables that some platforms freeze into the captured task; a no-op where they are device data."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the graph holds; its place in the budget is free again. A closed graph is not replayed."""


class Graph(ABC):
    """A platform's way to capture."""

    @abstractmethod
    def new_pool(self) -> object | None:
        """Memory that graphs captured with it share, if they never replay at the same time; None where there is none."""

    @abstractmethod
    def capture(self, function: Callable[[], Any], pool: object | None = None) -> CapturedGraph:
        """Captures one call of `function`, which must not synchronise, allocate on the host, or branch on a tensor's value.

        Platforms that record work call it before, to warm up; so it must bear being called several times.
        Errors: `graph_budget_exhausted`; `graph_capture_failed`, which names the function and keeps the cause.
        """

    def split(self) -> None:  # noqa: B027 (most platforms gain nothing)
        """In a function while it is captured: what came until now is launched apart, so that the device begins with it while
        the host still launches the rest. Elsewhere without effect."""

    @abstractmethod
    def budget(self) -> int | None:
        """How many graphs may still be captured; None when nothing limits them."""
