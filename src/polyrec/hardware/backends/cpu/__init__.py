"""The CPU platform: torch on the host, graphs that call their function, the reference ops as they are."""

from ...base.backend import HardwareBackend
from ...ops import REFERENCE_OPS
from .graph import CpuGraph
from .runtime import CpuRuntime


class CpuBackend(HardwareBackend):
    """Runs everything on the host. Exact in fp32, and the place where every path is tested."""

    platform_name = "cpu"

    def __init__(self, device_index: int = 0) -> None:
        super().__init__(runtime=CpuRuntime(), graph=CpuGraph(), ops=REFERENCE_OPS)
