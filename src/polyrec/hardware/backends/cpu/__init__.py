"""The CPU platform: torch on the host, graphs that call their function, the reference ops but for matrix products."""

from __future__ import annotations

from ...base.backend import Capabilities, HardwareBackend
from ...base.graph import Graph
from ...base.probe import Probe
from ...base.runtime import Runtime
from ...ops import PlatformOps
from ..machine import Machine
from .graph import CpuGraph
from .ops import cpu_ops
from .runtime import CpuRuntime, cpu_name

# fp8: tensors of that type exist here and the references compute on them, at no gain; so nothing is claimed.
CPU_CAPABILITIES = Capabilities(fp8=False, captures=False, async_copies=False)


class CpuBackend(HardwareBackend):
    """Runs everything on the host. Exact in fp32, and the place where every path is tested."""

    platform_name = "cpu"
    device_type = "cpu"
    half_by_default = False

    def __init__(
        self,
        *,
        runtime: Runtime | None = None,
        graph: Graph | None = None,
        ops: PlatformOps | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        super().__init__(
            runtime=runtime or CpuRuntime(),
            graph=graph or CpuGraph(),
            ops=ops or cpu_ops(),
            capabilities=capabilities or CPU_CAPABILITIES,
        )

    @classmethod
    def probe(cls, machine: Machine | None = None) -> Probe:
        """There is always a host."""
        return Probe.usable((cpu_name(machine or Machine()),))
