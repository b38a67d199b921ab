"""Captured graphs over a torch device module that offers what `torch.cuda` offers.

A capture that fails leaves the process as it was: torch's own context manager would leave the side stream current and the
device's generator waiting for a capture that has ended, so the capture is driven here.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ....core.errors import HardwareError
from ...base.graph import CapturedGraph, Graph, States
from ...base.runtime import Runtime


class CudaLikeCapturedGraph(CapturedGraph):
    """A recorded function. It keeps the function, and so the buffers that the function holds, alive."""

    def __init__(self, graph: Any, function: Callable[[], Any], result: Any, on_close: Callable[[], None]) -> None:
        self._graph = graph
        self._function: Callable[[], Any] | None = function
        self._result = result
        self._on_close = on_close

    def replay(self) -> Any:
        assert self._graph is not None, "a closed graph is not replayed"
        self._graph.replay()
        return self._result

    def update(self, states: States) -> None:
        """Nothing to do: lengths and tables are device data, which the recorded kernels read anew."""

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
            self._graph = self._function = self._result = None
            self._on_close()


class CudaLikeGraph(Graph):
    """Records work on a side stream after warming up.

    runtime: whose device; None: the thread's current device. module: None is torch.cuda. graph_class: its name there.
    max_graphs: the budget, None for no limit. warm_ups: calls before the capture; libraries allocate work space and choose
    kernels in the first ones.
    """

    def __init__(
        self,
        runtime: Runtime | None = None,
        *,
        module: Any = None,
        graph_class: str = "CUDAGraph",
        max_graphs: int | None = None,
        warm_ups: int = 2,
    ) -> None:
        self._module = torch.cuda if module is None else module
        self._graph_class = graph_class
        self._runtime = runtime
        self._max_graphs = max_graphs
        self._warm_ups = warm_ups
        self._live = 0
        self._side: Any = None  # one for all captures: the allocator shares a pool's memory only within one stream

    def new_pool(self) -> object | None:
        pool: object = self._module.graph_pool_handle()
        return pool

    def budget(self) -> int | None:
        return None if self._max_graphs is None else self._max_graphs - self._live

    def capture(self, function: Callable[[], Any], pool: object | None = None) -> CapturedGraph:
        """An error of a warm-up call is the function's own and comes as it is; the generator ends where it began."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        if self.budget() == 0:
            raise HardwareError(
                "graph_budget_exhausted",
                f"'{name}' would be captured graph {self._live + 1}, and the budget is {self._max_graphs}.",
                "Close graphs that are no longer replayed, use fewer buckets, or raise the budget.",
            )
        module = self._module
        device = None if self._runtime is None else self._runtime.device
        with module.device(device):
            before = module.current_stream()
            self._side = self._side or module.Stream()
            self._side.wait_stream(before)
            try:
                module.set_stream(self._side)
                self._warm_up(function)
                graph, result = self._record(function, pool, name)
            finally:
                module.set_stream(before)
            before.wait_stream(self._side)
        self._live += 1
        return CudaLikeCapturedGraph(graph, function, result, self._free_place)

    def _warm_up(self, function: Callable[[], Any]) -> None:
        """Calls the function and takes back what it drew, so that capturing changes no later draw."""
        state = self._module.get_rng_state()
        for _ in range(self._warm_ups):
            function()
        self._module.set_rng_state(state)

    def _record(self, function: Callable[[], Any], pool: object | None, name: str) -> tuple[Any, Any]:
        module = self._module
        gc.collect()  # a tensor or graph that dies during a capture would free memory within it
        module.synchronize()
        module.empty_cache()
        graph = getattr(module, self._graph_class)()
        try:
            graph.capture_begin(*(() if pool is None else (pool,)))
            try:
                result = function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is broken already, by the error that goes on
                    graph.capture_end()
                raise
            graph.capture_end()
        except Exception as error:
            self._release_generator()
            raise HardwareError(
                "graph_capture_failed",
                f"'{name}' could not be captured: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                "In a captured function nothing synchronises (.item(), .cpu(), boolean indexing), allocates on the host or"
                " branches on a tensor's value.",
            ) from error
        return graph, result

    def _release_generator(self) -> None:
        """A broken capture leaves the device's generator refusing every eager draw; a whole one, of nothing, ends that.

        (Giving the generator a fresh state would do so too, but part it from the graphs that are captured already.)
        """
        graph = getattr(self._module, self._graph_class)()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the graph is empty
            graph.capture_begin()
            graph.capture_end()
        graph.reset()

    def _free_place(self) -> None:
        self._live -= 1
