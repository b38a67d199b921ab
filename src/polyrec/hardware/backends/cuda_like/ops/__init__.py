"""The operations of CUDA-like platforms, group by group: torch's own kernels, but for what a captured graph needs otherwise.

None of these needs more than torch, so other platforms take them too.
"""

from __future__ import annotations

from ....ops import (
    REFERENCE_ACT_OPS,
    REFERENCE_KV_OPS,
    REFERENCE_LOSS_OPS,
    REFERENCE_MOE_OPS,
    REFERENCE_NORM_OPS,
    REFERENCE_ROPE_OPS,
    REFERENCE_SAMPLING_OPS,
    PlatformOps,
)
from .linear import CUDA_LIKE_LINEAR_OPS
from .search import CUDA_LIKE_SEARCH_OPS

CUDA_LIKE_NORM_OPS = REFERENCE_NORM_OPS
CUDA_LIKE_ACT_OPS = REFERENCE_ACT_OPS
CUDA_LIKE_ROPE_OPS = REFERENCE_ROPE_OPS
CUDA_LIKE_KV_OPS = REFERENCE_KV_OPS
CUDA_LIKE_SAMPLING_OPS = REFERENCE_SAMPLING_OPS
CUDA_LIKE_MOE_OPS = REFERENCE_MOE_OPS
CUDA_LIKE_LOSS_OPS = REFERENCE_LOSS_OPS

CUDA_LIKE_OPS = PlatformOps(
    norm=CUDA_LIKE_NORM_OPS,
    act=CUDA_LIKE_ACT_OPS,
    rope=CUDA_LIKE_ROPE_OPS,
    linear=CUDA_LIKE_LINEAR_OPS,
    kv=CUDA_LIKE_KV_OPS,
    search=CUDA_LIKE_SEARCH_OPS,
    sampling=CUDA_LIKE_SAMPLING_OPS,
    moe=CUDA_LIKE_MOE_OPS,
    loss=CUDA_LIKE_LOSS_OPS,
)
