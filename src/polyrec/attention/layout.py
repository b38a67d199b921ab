"""How packed sequences are laid out for attention: made once per batch, on the host, and moved to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from ..hardware.base.attention import PackedLayout, PageTable


def stay(tensor: Tensor) -> Tensor:
    """Leaves a tensor where it is."""
    return tensor


def packed_layout(
    lengths: Tensor,
    branch: Tensor | None = None,
    to_device: Callable[[Tensor], Tensor] = stay,
    table: PageTable | None = None,
) -> PackedLayout:
    """Layout of sequences of `lengths` int64 [R] (host), packed in order.

    branch: int64 [T] (host), 0 for a sequence's prompt and b >= 1 for its b-th branch: a branch sees the prompt and itself.
    to_device: a runtime's copy to its device. table: a host table of the sequences' prompts.
    """
    of_row = None if branch is None else to_device(branch)
    if table is not None:
        cached = None if table.cached is None else to_device(table.cached)
        all_begun = table.cached is not None and bool((table.cached > 0).all())
        table = dataclasses.replace(
            table,
            pages=to_device(table.pages),
            cached=cached,
            host_pages=table.pages,
            host_cached=table.cached,
            all_begun=all_begun,
        )
    longest, num_tokens = int(lengths.max()), int(lengths.sum())
    return PackedLayout(to_device(lengths), longest, num_tokens, of_row, host_lengths=lengths, table=table)
