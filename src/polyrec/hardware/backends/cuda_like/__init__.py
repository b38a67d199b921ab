"""Platforms whose torch offers `torch.cuda`: the base, with runtime, graph and ops that others may take, and NVIDIA.

A CUDA-compatible vendor is a subclass with another `platform_name` and a row in the table of differences (`variants`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from ...base.backend import Capabilities, HardwareBackend
from ...base.graph import Graph
from ...base.probe import Probe
from ...base.runtime import Runtime
from ...ops import PlatformOps
from ..machine import Machine
from .differences import NVIDIA, Variant
from .graph import CudaLikeCapturedGraph, CudaLikeGraph
from .ops import (
    CUDA_LIKE_ACT_OPS,
    CUDA_LIKE_KV_OPS,
    CUDA_LIKE_LINEAR_OPS,
    CUDA_LIKE_LOSS_OPS,
    CUDA_LIKE_MOE_OPS,
    CUDA_LIKE_NORM_OPS,
    CUDA_LIKE_OPS,
    CUDA_LIKE_OPTIM_OPS,
    CUDA_LIKE_ROPE_OPS,
    CUDA_LIKE_SAMPLING_OPS,
    CUDA_LIKE_SEARCH_OPS,
    cuda_like_ops,
)
from .probe import probe_cuda_like
from .runtime import CudaLikeRuntime

__all__ = [
    "CUDA_LIKE_ACT_OPS",
    "CUDA_LIKE_KV_OPS",
    "CUDA_LIKE_LINEAR_OPS",
    "CUDA_LIKE_LOSS_OPS",
    "CUDA_LIKE_MOE_OPS",
    "CUDA_LIKE_NORM_OPS",
    "CUDA_LIKE_OPS",
    "CUDA_LIKE_OPTIM_OPS",
    "CUDA_LIKE_ROPE_OPS",
    "CUDA_LIKE_SAMPLING_OPS",
    "CUDA_LIKE_SEARCH_OPS",
    "CudaLikeBackend",
    "CudaLikeCapturedGraph",
    "CudaLikeGraph",
    "CudaLikeRuntime",
    "NvidiaBackend",
    "Variant",
    "cuda_like_ops",
]


class CudaLikeBackend(HardwareBackend):
    """Base of the platforms that torch shows as "cuda". variant: this platform's row of the table of differences."""

    device_type = "cuda"
    attention_order: ClassVar[tuple[str, ...]] = ("triton", "sdpa")
    variant: ClassVar[Variant] = dataclasses.replace(NVIDIA, fp8_from=None)

    def __init__(
        self,
        *,
        runtime: Runtime | None = None,
        graph: Graph | None = None,
        ops: PlatformOps | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        """Each part may be another backend's; None is this one's own. Capabilities are asked of the current device.

        Operations are Triton's where it is installed, settled here for the life of the process.
        """
        variant = self.variant
        capabilities = capabilities or capabilities_of(variant, torch.cuda)
        runtime = runtime or CudaLikeRuntime(collectives=variant.collectives, visible_devices=variant.visible[0])
        super().__init__(
            runtime=runtime,
            graph=graph or CudaLikeGraph(runtime),
            ops=ops or cuda_like_ops(triton=Machine().has_package("triton"), fp8=capabilities.fp8),
            capabilities=capabilities,
        )

    @classmethod
    def probe(cls, machine: Machine | None = None, torch_package: Any = torch) -> Probe:
        return probe_cuda_like(cls.variant, machine or Machine(), torch_package)


class NvidiaBackend(CudaLikeBackend):
    """NVIDIA GPUs through torch's CUDA builds."""

    platform_name = "nvidia"
    attention_order = ("flashinfer", *CudaLikeBackend.attention_order)
    variant = NVIDIA

    @classmethod
    def probe(cls, machine: Machine | None = None, torch_package: Any = torch) -> Probe:
        """A usable one notes where flashinfer is not installed."""
        machine = machine or Machine()
        found = super().probe(machine, torch_package)
        if found.state != "usable" or machine.has_package("flashinfer"):
            return found
        instead = next((name for name in cls.attention_order if name != "flashinfer"), "another backend")
        return Probe.usable(found.devices, f"flashinfer is absent: attention runs through {instead}.")


def capabilities_of(variant: Variant, module: Any) -> Capabilities:
    """What the current device can do; without one, what every device of the variant can."""
    bf16, fp8 = variant.bf16_from is None, False
    if module.device_count():
        capability = tuple(module.get_device_capability())
        bf16 = bf16 or capability >= (variant.bf16_from or (0, 0))
        fp8 = variant.fp8_from is not None and capability >= variant.fp8_from
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if bf16 else (torch.float32, torch.float16)
    return Capabilities(dtypes=dtypes, fp8=fp8, captures=True, async_copies=True)
