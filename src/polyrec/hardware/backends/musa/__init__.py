"""Moore Threads GPUs through torch_musa, which offers as `torch.musa` what `torch.cuda` offers.

Source: torch_musa's README and modules (core/device, stream, memory, random; ProcessGroupMCCL names its backend "mccl").
"""

from __future__ import annotations

import torch

from ...base.backend import Capabilities, HardwareBackend
from ...base.graph import Graph
from ...base.probe import Probe
from ...base.runtime import Runtime
from ...ops import PlatformOps
from ..cuda_like.probe import DEVICE_ERRORS, device_names, first_line, hidden_by, initialisation_error
from ..machine import Machine
from .graph import has_graphs, musa_graph
from .ops import MUSA_OPS
from .runtime import VISIBLE_DEVICES, MusaRuntime, load_musa

SIGNS = ("/dev/mtgpu*",)  # mtgpu.0 or mtgpu0, by driver version
PACKAGE = "torch_musa"
INSTALL = "Install the torch_musa that Moore Threads publishes for this torch."


class MusaBackend(HardwareBackend):
    """Moore Threads GPUs. fp8 is off: which of them multiply e4m3 tensors is not settled without the hardware."""

    platform_name = "musa"
    device_type = "musa"
    remark = "Written, not run on this hardware."

    def __init__(
        self,
        *,
        runtime: Runtime | None = None,
        graph: Graph | None = None,
        ops: PlatformOps | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        """Each part may be another backend's; None is this one's own."""
        runtime = runtime or MusaRuntime()
        super().__init__(
            runtime=runtime,
            graph=graph or musa_graph(runtime),
            ops=ops or MUSA_OPS,
            capabilities=capabilities or Capabilities(captures=has_graphs(runtime), async_copies=True),
        )

    @classmethod
    def probe(cls, machine: Machine | None = None) -> Probe:
        """Loads torch_musa, which takes torch's one place for extensions, only beside a device of its own."""
        machine = machine or Machine()
        found = [path for pattern in SIGNS for path in machine.matches(pattern)]
        if not found:
            return Probe.absent(f"No sign of Moore Threads' driver ({', '.join(SIGNS)}).")
        if not machine.has_package(PACKAGE):
            return Probe.failed(
                f"torch_musa is not installed, so torch {torch.__version__} cannot use the Moore Threads device"
                f" {found[0]}. {INSTALL}"
            )
        try:
            module = load_musa(machine)
            names = device_names(module)
        except DEVICE_ERRORS as error:
            return Probe.failed(f"torch_musa is installed and does not work: {first_line(error)} {INSTALL}")
        if names:
            return Probe.usable(names)
        if hidden := hidden_by((VISIBLE_DEVICES,), machine):
            return Probe.failed(hidden)
        raised = initialisation_error(module)
        reason = f"torch_musa counts no device beside {found[0]}"
        return Probe.failed(
            f"{reason}: {first_line(raised)}"
            if raised
            else f"{reason}. Check it with mthreads-gmi and its permissions."
        )
