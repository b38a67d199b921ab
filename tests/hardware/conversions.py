"""What stands in for a part of Triton's interpreter that is wrong. For test bodies that run there."""

from __future__ import annotations

import numpy as np
import torch

BY_TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
}


def converted(values, source, target, rounding):
    """For the interpreter's conversion, which loses a carry into the exponent (1.97 becomes 1 in e4m3)."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).view(BY_TORCH[str(source)]).to(BY_TORCH[str(target)])
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[tensor.element_size()]
    return tensor.view(bits).numpy()
