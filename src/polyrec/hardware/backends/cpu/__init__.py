"""The CPU platform: torch on the host, graphs that call their function, the reference ops but for matrix products."""

from ...base.backend import HardwareBackend
from .graph import CpuGraph
from .ops import cpu_ops
from .runtime import CpuRuntime


class CpuBackend(HardwareBackend):
    """Runs everything on the host. Exact in fp32, and the place where every path is tested."""

    platform_name = "cpu"

    def __init__(self) -> None:
        super().__init__(runtime=CpuRuntime(), graph=CpuGraph(), ops=cpu_ops())
