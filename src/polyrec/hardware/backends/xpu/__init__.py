"""Intel GPUs through `torch.xpu`, part of torch itself.

Source: torch's documentation of torch.xpu and "Getting Started on Intel GPU"; XPUGraph came with torch 2.11, the collective
backend "xccl" with 2.8.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ...base.backend import Capabilities, HardwareBackend
from ...base.graph import Graph
from ...base.probe import Probe
from ...base.runtime import Runtime
from ...ops import PlatformOps
from ..cuda_like.probe import DEVICE_ERRORS, device_names, first_line, initialisation_error
from ..machine import Machine
from .graph import has_graphs, xpu_graph
from .ops import XPU_OPS
from .runtime import VISIBLE_DEVICES, XpuRuntime

INTEGRATED_SLOT = "0000:00:02.0"  # Intel's integrated graphics are always this PCI function; cards are behind a bridge


class XpuBackend(HardwareBackend):
    """Intel GPUs. fp8 is off: which of them multiply e4m3 tensors is not settled without the hardware."""

    platform_name = "xpu"
    device_type = "xpu"
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
        runtime = runtime or XpuRuntime()
        super().__init__(
            runtime=runtime,
            graph=graph or xpu_graph(runtime),
            ops=ops or XPU_OPS,
            capabilities=capabilities or Capabilities(captures=has_graphs(runtime), async_copies=True),
        )

    @classmethod
    def probe(cls, machine: Machine | None = None, torch_package: Any = torch) -> Probe:
        """A torch without XPU has failed beside a card, but not beside integrated graphics: torch supports few of them."""
        machine = machine or Machine()
        integrated, cards = intel_gpus(machine)
        if not getattr(torch_package.version, "xpu", None):
            if not cards:
                note = f" Integrated graphics ({integrated[0]}) may do: see torch.xpu." if integrated else ""
                return Probe.absent(
                    f"No Intel GPU card, and torch {torch_package.__version__} is not built for one.{note}"
                )
            return Probe.failed(
                f"torch {torch_package.__version__} is built without XPU, on a machine with the Intel GPU {cards[0]}."
                " Install an XPU build of torch (pytorch.org, 'Start locally')."
            )
        found = cards + integrated
        try:
            names = device_names(torch_package.xpu)
        except DEVICE_ERRORS as error:
            return Probe.failed(f"torch.xpu does not work: {first_line(error)} Update Intel's GPU driver.")
        if names:
            return Probe.usable(names)
        if not found:
            return Probe.absent("torch is built for XPU, and no Intel GPU is here (/sys/class/drm).")
        raised = initialisation_error(torch_package.xpu)
        return Probe.failed(
            f"torch.xpu counts no device beside the Intel GPU {found[0]}{': ' + first_line(raised) if raised else '.'}"
            " Install Intel's GPU driver with Level Zero, join the group that owns /dev/dri/renderD*, and see that"
            f" {VISIBLE_DEVICES} does not hide it."
        )


def intel_gpus(machine: Machine) -> tuple[list[str], list[str]]:
    """PCI addresses of Intel's integrated graphics, and of its cards."""
    integrated: set[str] = set()
    cards: set[str] = set()
    for path in machine.matches("/sys/class/drm/card*/device/uevent"):
        facts = dict(re.findall(r"^(\w+)=(.*)$", machine.read(path), flags=re.MULTILINE))
        slot = facts.get("PCI_SLOT_NAME", "")
        if facts.get("PCI_ID", "").startswith("8086:") and slot:
            (integrated if slot == INTEGRATED_SLOT else cards).add(slot)
    return sorted(integrated), sorted(cards)
