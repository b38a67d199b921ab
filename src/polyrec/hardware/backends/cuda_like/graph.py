"""Captured graphs over a torch device module that offers what `torch.cuda` offers.

A capture that fails leaves the process usable: torch's own context manager would leave the side stream current, and its
allocator and generator within a capture that has ended. So the capture is driven, and mended, here.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ....core.errors import HardwareError
from ...base.graph import CapturedGraph, Graph, States, capture_failed
from ...base.runtime import Runtime


class CudaLikeCapturedGraph(CapturedGraph):
    """A recorded function, in one or more pieces. It keeps the function, and so the buffers that the function holds, alive."""

    def __init__(
        self, pieces: list[Any], function: Callable[[], Any], result: Any, on_close: Callable[[], None]
    ) -> None:
        self._pieces = pieces
        self._function: Callable[[], Any] | None = function
        self._result = result
        self._on_close = on_close

    def replay(self) -> Any:
        assert self._pieces, "a closed graph is not replayed"
        for piece in self._pieces:
            piece.replay()
        return self._result

    def update(self, states: States) -> None:
        """Nothing to do: lengths and tables are device data, which the recorded kernels read anew."""

    def close(self) -> None:
        if self._pieces:
            for piece in self._pieces:
                piece.reset()
            self._pieces, self._function, self._result = [], None, None
            self._on_close()


class CudaLikeGraph(Graph):
    """Records work on a side stream after warming up.

    runtime: whose device; None: the thread's current device. module: None is torch.cuda. graph_class: its name there.
    max_graphs: the budget, None for no limit. warm_ups: calls before the first capture, in which libraries
    allocate work space and choose kernels; before a later one a single call does, which compiles and loads what is new.
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
        self._device_type = "cuda" if runtime is None else runtime.device.type
        self._broken: list[Any] = []
        self._pieces: list[Any] = []  # of the capture that is under way, and the pool of it
        self._pool: object | None = None
        self._side: Any = None  # one for all captures: the allocator shares a pool's memory only within one stream

    def new_pool(self) -> object | None:
        pool: object = self._module.graph_pool_handle()
        return pool

    def budget(self) -> int | None:
        return None if self._max_graphs is None else self._max_graphs - self._live

    def capture(self, function: Callable[[], Any], pool: object | None = None) -> CapturedGraph:
        """An error of a warm-up call is the function's own and comes as it is, but for a lack of memory; the generator ends
        where it began."""
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
            warm_ups = self._warm_ups if self._side is None else min(self._warm_ups, 1)
            self._side = self._side or module.Stream()
            self._side.wait_stream(before)
            try:
                module.set_stream(self._side)
                self._warm_up(function, warm_ups)
                pieces, result = self._record(function, pool)
            except torch.OutOfMemoryError as error:
                raise capture_failed(function, error) from error
            finally:
                module.set_stream(before)
            before.wait_stream(self._side)
        self._live += 1
        return CudaLikeCapturedGraph(pieces, function, result, self._free_place)

    def _warm_up(self, function: Callable[[], Any], times: int) -> None:
        """Calls the function and takes back what it drew, so that capturing changes no later draw."""
        state = self._module.get_rng_state()
        for _ in range(times):
            function()
        self._module.set_rng_state(state)

    def split(self) -> None:
        if self._pieces:
            self._pieces[-1].capture_end()
            self._begin_piece()

    def _begin_piece(self) -> None:
        graph = getattr(self._module, self._graph_class)()
        graph.capture_begin(self._pool)
        self._pieces.append(graph)

    def _record(self, function: Callable[[], Any], pool: object | None) -> tuple[list[Any], Any]:
        """-> the pieces, in order, and the function's result."""
        module = self._module
        self._pool = self.new_pool() if pool is None else pool
        module.synchronize()
        collects = gc.isenabled()
        gc.disable()  # a tensor or graph in a cycle would free memory in the middle of the capture
        try:
            self._begin_piece()
            pieces = self._pieces
            try:
                result = function()
            # Ctrl-C too must end the capture, or the process cannot use the device again; it goes on.
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is broken already, by the error that goes on
                    pieces[-1].capture_end()
                self._repair(pieces)
                raise
            try:
                pieces[-1].capture_end()
            except RuntimeError:
                self._repair(pieces)
                raise
        except Exception as error:
            raise capture_failed(function, error) from error
        finally:
            self._pieces = []
            if collects:
                gc.enable()
        return pieces, result

    def _repair(self, pieces: list[Any]) -> None:
        """Undoes what a broken capture leaves behind in torch; most of it until 2.12 or 2.13 (pytorch 180395, 190348).

        The allocator still counts a capture, and then gives nothing back to the device; and the generator refuses every
        eager draw. A whole capture, of nothing, frees the generator. (A fresh state would too, but part it from the graphs
        that are captured already.) The scratch memory of the broken capture itself may stay reserved in such a torch.
        """
        for piece in pieces[:-1]:
            piece.reset()
        end_pool = getattr(torch._C, f"_{self._device_type}_endAllocateToPool", None)
        if end_pool is not None:
            with contextlib.suppress(RuntimeError):  # that this pool has ended: a torch that is mended
                end_pool(self._module.current_device(), self._pool)
                self._broken.append(pieces[-1])  # torch's allocator of pinned memory may still refer to it
        empty = getattr(self._module, self._graph_class)()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is empty
            empty.capture_begin()
            empty.capture_end()
        empty.reset()

    def _free_place(self) -> None:
        self._live -= 1
