"""The CUDA-compatible platforms of other vendors: NVIDIA's parts under another name, with their row of the differences."""

from __future__ import annotations

from . import CudaLikeBackend
from .differences import METAX, ROCM


class MetaxBackend(CudaLikeBackend):
    """MetaX GPUs through MetaX's CUDA-compatible build of torch."""

    platform_name = "metax"
    remark = "Written, not run on this hardware."
    variant = METAX


class RocmBackend(CudaLikeBackend):
    """AMD GPUs through torch's ROCm builds. fp8 is off: MI300's format is e4m3fnuz, and our tensors are e4m3fn."""

    platform_name = "rocm"
    remark = "Written, not run on this hardware."
    variant = ROCM
