"""The table of what parts the platforms that torch shows as "cuda", and how one tells whose torch is installed.

Sources. AMD: PyTorch's "HIP (ROCm) semantics" note (torch.cuda is reused, torch.version.hip is set, RCCL answers to "nccl") and
hipBLASLt's table of data types (gfx942, MI300, has e4m3fnuz and not e4m3fn). MetaX: vLLM-metax's platform class (device type
"cuda", collectives "nccl", CUDA_VISIBLE_DEVICES); public reports from C500 and C550 machines say that torch.version.maca is
set, the version reads "2.8.0+metax3.5…", torch.version.cuda and hip look like NVIDIA's, devices are called "MetaX C550", a warp
has 64 lanes and the device file is /dev/mxcd. NVIDIA: the driver's README (/proc/driver/nvidia, /dev/nvidiactl).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Build = Literal["cuda", "hip", "maca", "none"]


@dataclass(frozen=True)
class Variant:
    """How one vendor's platform differs.

    build: the kind of torch that drives it. signs: files that only its driver makes. driver: the file that tells the driver's
    version, if any. visible: variables that hide devices. install: the remedy where torch is another build. collectives: the
    torch.distributed backend. bf16_from, fp8_from: the first compute capability with bf16 arithmetic and with products of e4m3
    tensors; None: every device has bf16, and none fp8. warp_size: lanes that run together, which kernels are tuned for.
    """

    vendor: str
    build: Build
    signs: tuple[str, ...]
    visible: tuple[str, ...]
    install: str
    driver: str = ""
    collectives: str = "nccl"
    bf16_from: tuple[int, int] | None = None
    fp8_from: tuple[int, int] | None = None
    warp_size: int = 32


NVIDIA = Variant(
    vendor="NVIDIA",
    build="cuda",
    signs=("/proc/driver/nvidia/version", "/dev/nvidiactl"),
    driver="/proc/driver/nvidia/version",
    visible=("CUDA_VISIBLE_DEVICES",),
    install="Install a CUDA build of torch (pytorch.org, 'Start locally').",
    bf16_from=(8, 0),
    fp8_from=(8, 9),
)
METAX = Variant(
    vendor="MetaX",
    build="maca",
    signs=("/dev/mxcd",),
    visible=("CUDA_VISIBLE_DEVICES",),
    install="Install MetaX's build of torch, which comes with the MACA SDK.",
    warp_size=64,
)
ROCM = Variant(
    vendor="AMD",
    build="hip",
    signs=("/dev/kfd",),
    visible=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    install="Install a ROCm build of torch (pytorch.org, 'Start locally').",
    warp_size=64,  # CDNA; RDNA runs 32
)


def build_of(torch: Any) -> Build:
    """Whose torch this is; nothing is initialised."""
    version = torch.version
    if getattr(version, "hip", None):
        return "hip"
    text = str(torch.__version__).lower()
    if getattr(version, "maca", None) or "metax" in text or "maca" in text:
        return "maca"
    return "cuda" if getattr(version, "cuda", None) else "none"
