"""Capture once, replay many times: the contract between the engine's runner and a platform's graphs."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...core.errors import HardwareError

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
        Errors: `graph_budget_exhausted`; `graph_capture_failed`, which names the function and where in it that
        was, and keeps the cause; `graph_memory_exceeded`.
        """

    def split(self) -> None:  # noqa: B027 (most platforms gain nothing)
        """In a function while it is captured: what came until now is launched apart, so that the device begins with it while
        the host still launches the rest. Elsewhere without effect."""

    @abstractmethod
    def budget(self) -> int | None:
        """How many graphs may still be captured; None when nothing limits them."""


def capture_failed(function: Callable[[], Any], error: Exception, hint: str = "") -> HardwareError:
    """What a platform raises when capturing the function ended with that error. hint: what else may help there."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    cause = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if isinstance(error, torch.OutOfMemoryError):
        return HardwareError(
            "graph_memory_exceeded",
            f"The device has no room for '{name}' as a graph: {cause}",
            "Lower --memory-fraction, so that keys and values leave graphs more, or record less with a lower --max-beam-width.",
        )
    return HardwareError(
        "graph_capture_failed",
        f"'{name}' could not be captured{_place_of(error)}: {cause}",
        "In a captured function nothing synchronises (.item(), .cpu(), boolean indexing), allocates on the host or"
        f" branches on a tensor's value. {hint}".rstrip(),
    )


def _place_of(error: Exception) -> str:
    """The innermost function that the error came through, but for those of torch and Triton: the operation, as a rule."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_a_librarys(Path(frame.filename))]
    return f", in {frames[-1].name} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _is_a_librarys(file: Path) -> bool:
    return file.is_relative_to(Path(torch.__file__).parent) or "triton" in file.parent.parts
