"""Graphs of `torch.musa`: `MUSAGraph` where the installed torch_musa has it, else calls."""

from __future__ import annotations

from ...base.graph import Graph
from ...base.runtime import Runtime
from ..cpu.graph import CpuGraph
from ..cuda_like.graph import CudaLikeGraph
from ..cuda_like.runtime import CudaLikeRuntime

GRAPH_CLASS = "MUSAGraph"


def has_graphs(runtime: Runtime) -> bool:
    """Whether this torch_musa records graphs; early versions do not."""
    return isinstance(runtime, CudaLikeRuntime) and hasattr(runtime.module, GRAPH_CLASS)


def musa_graph(runtime: Runtime) -> Graph:
    """Recorded graphs, or calls of the function."""
    if isinstance(runtime, CudaLikeRuntime) and has_graphs(runtime):
        return CudaLikeGraph(runtime, module=runtime.module, graph_class=GRAPH_CLASS)
    return CpuGraph()
