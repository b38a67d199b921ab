"""The operations of CUDA-like platforms, group by group, in two forms.

`CUDA_LIKE_OPS` is torch's own kernels, but for what a captured graph needs otherwise. It needs no more than torch, so other
platforms take it too. `cuda_like_ops` replaces fields of it by Triton's kernels, where Triton is installed.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from ....ops import (
    REFERENCE_ACT_OPS,
    REFERENCE_KV_OPS,
    REFERENCE_LOSS_OPS,
    REFERENCE_MOE_OPS,
    REFERENCE_NORM_OPS,
    REFERENCE_OPTIM_OPS,
    REFERENCE_ROPE_OPS,
    REFERENCE_SAMPLING_OPS,
    PlatformOps,
)
from .act import act_ops
from .beams import search_ops
from .kv import kv_ops
from .linear import CUDA_LIKE_LINEAR_OPS, linear_ops
from .loss import loss_ops
from .norm import norm_ops
from .optim import optim_ops
from .rope import rope_ops
from .search import CUDA_LIKE_SEARCH_OPS

CUDA_LIKE_NORM_OPS = REFERENCE_NORM_OPS
CUDA_LIKE_ACT_OPS = REFERENCE_ACT_OPS
CUDA_LIKE_ROPE_OPS = REFERENCE_ROPE_OPS
CUDA_LIKE_KV_OPS = REFERENCE_KV_OPS
CUDA_LIKE_SAMPLING_OPS = REFERENCE_SAMPLING_OPS
CUDA_LIKE_MOE_OPS = REFERENCE_MOE_OPS
CUDA_LIKE_LOSS_OPS = REFERENCE_LOSS_OPS
CUDA_LIKE_OPTIM_OPS = REFERENCE_OPTIM_OPS

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
    optim=CUDA_LIKE_OPTIM_OPS,
)


@functools.cache
def cuda_like_ops(*, triton: bool, fp8: bool) -> PlatformOps:
    """triton: whether it can be imported. fp8: whether the device has e4m3, without which Triton does not compile it."""
    if not triton:
        return CUDA_LIKE_OPS
    return replace(
        CUDA_LIKE_OPS,
        norm=norm_ops(fp8),
        act=act_ops(fp8),
        rope=rope_ops(),
        linear=linear_ops(fp8),
        kv=kv_ops(),
        search=search_ops(),
        loss=loss_ops(),
        optim=optim_ops(),
    )
