"""The Ascend platform: Huawei's NPUs through torch_npu, which is imported when the backend is built."""

from __future__ import annotations

from typing import Any

import torch

from ...base.backend import Capabilities, HardwareBackend
from ...base.graph import Graph
from ...base.probe import Probe
from ...base.registry import register_attention
from ...base.runtime import Runtime
from ...ops import PlatformOps
from ..machine import Machine
from .graph import AscendGraph
from .library import load_library
from .ops import ascend_ops
from .probe import probe_ascend
from .runtime import AscendRuntime

# With the platform, not before: on others nobody can choose it.
register_attention("ascend", "polyrec.hardware.backends.ascend.attention:AscendAttention")


class AscendBackend(HardwareBackend):
    """Ascend 910B and its successors of the Atlas A2 and A3 series. They have no fp8, so what needs it is refused.

    library: torch_npu, or what stands in for it.
    """

    platform_name = "ascend"
    device_type = "npu"
    remark = "Written, not run on this hardware."
    attention_order = ("ascend", "sdpa")

    def __init__(
        self,
        library: Any = None,
        *,
        runtime: Runtime | None = None,
        graph: Graph | None = None,
        ops: PlatformOps | None = None,
    ) -> None:
        library = load_library() if library is None else library
        super().__init__(
            runtime=runtime or AscendRuntime(library),
            graph=graph or AscendGraph(library),
            ops=ops or ascend_ops(library),
            capabilities=Capabilities(
                dtypes=(torch.float32, torch.bfloat16, torch.float16), captures=True, async_copies=True
            ),
        )

    @classmethod
    def probe(cls) -> Probe:
        return probe_ascend(Machine())
