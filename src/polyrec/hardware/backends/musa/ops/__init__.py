"""The operations of Moore Threads GPUs: those of the CUDA-like platforms, which need no more than torch's own kernels."""

from __future__ import annotations

from ...cuda_like.ops import CUDA_LIKE_OPS

MUSA_OPS = CUDA_LIKE_OPS
