"""Matrix products: torch's own, and groups of them through npu_grouped_matmul."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....ops.linear import LinearOps, mm
from ....ops.linear import grouped_mm as reference_grouped_mm
from ....ops.spec import op_claims, partial_group

SIZES = 1  # group_list_type: how many rows a group has, rather than where it ends
BY_ROWS = 0  # group_type: x is split along its rows
ONE_RESULT = 3  # split_item: all groups' rows in one tensor
MAX_GROUPS = 1024


class AscendLinear:
    """library: torch_npu."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @op_claims(train=False)  # for inference only, says torch_npu's documentation
    def grouped_mm(self, x: Tensor, weight: Tensor, group_sizes: Tensor) -> Tensor:
        """npu_grouped_matmul of one x, one weight [E, in, out] (a transposed view will do) and 2 to 1,024 groups."""
        if not 1 < len(weight) <= MAX_GROUPS or len(x) == 0:
            return reference_grouped_mm(x, weight, group_sizes)
        return self._library.npu_grouped_matmul(
            [x],
            [weight.transpose(1, 2)],
            group_list=group_sizes,
            split_item=ONE_RESULT,
            group_type=BY_ROWS,
            group_list_type=SIZES,
        )[0]


def linear_ops(library: Any) -> LinearOps:
    """Without fp8: these chips have none, and int8 is another contract (npu_dynamic_quant, npu_quant_matmul)."""
    return partial_group(LinearOps, mm=mm, grouped_mm=AscendLinear(library).grouped_mm)
