"""The operations of Ascend NPUs: torch_npu's kernels where their contract is ours, else torch's through the reference."""

from __future__ import annotations

from typing import Any

from ....ops import REFERENCE_LOSS_OPS, REFERENCE_OPTIM_OPS, REFERENCE_SAMPLING_OPS, PlatformOps
from ...cuda_like.ops import CUDA_LIKE_SEARCH_OPS
from .act import act_ops
from .kv import kv_ops
from .linear import linear_ops
from .moe import moe_ops
from .norm import norm_ops
from .rope import rope_ops


def ascend_ops(library: Any) -> PlatformOps:
    """All groups. library: torch_npu.

    Search, sampling, loss and the gradients' norm are torch's kernels, the beam step in the form that can be captured,
    which needs torch alone: `npu_top_k_top_p` filters both ways in one go and takes k up to 1,024 only, and
    `npu_cross_entropy_loss` needs the logits that our loss may never hold whole.
    """
    return PlatformOps(
        norm=norm_ops(library),
        act=act_ops(library),
        rope=rope_ops(library),
        linear=linear_ops(library),
        kv=kv_ops(library),
        search=CUDA_LIKE_SEARCH_OPS,
        sampling=REFERENCE_SAMPLING_OPS,
        moe=moe_ops(library),
        loss=REFERENCE_LOSS_OPS,
        optim=REFERENCE_OPTIM_OPS,
    )
