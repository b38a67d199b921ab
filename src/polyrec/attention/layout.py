"""How packed sequences are laid out for attention: made once per batch, on the host, and moved to the device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..hardware.base.attention import PackedLayout


def stay(tensor: Tensor) -> Tensor:
    """Leaves a tensor where it is."""
    return tensor


def packed_layout(
    lengths: Tensor, branch: Tensor | None = None, to_device: Callable[[Tensor], Tensor] = stay
) -> PackedLayout:
    """Layout of sequences of `lengths` int64 [R] (host), packed in order.

    branch: int64 [T] (host), 0 for a sequence's prompt and b >= 1 for its b-th branch: a branch sees the prompt and itself.
    to_device: a runtime's copy to its device.
    """
    of_row = None if branch is None else to_device(branch)
    return PackedLayout(to_device(lengths), int(lengths.max()), int(lengths.sum()), of_row, host_lengths=lengths)
