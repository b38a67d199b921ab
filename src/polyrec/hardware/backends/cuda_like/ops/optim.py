"""The gradients' norm through a Triton kernel that reads them all in one launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ....ops import optim as reference
from ....ops.optim import OptimOps
from ....ops.spec import FLOATS, op_claims
from .launch import kernels, runs_kernel

ALIGNMENT = 16  # bytes of a load


@op_claims(graph_safe=False)  # a replay would read the addresses that gradients had when it was captured
@torch.no_grad()
def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """`OptimOps.total_norm`: a launch for each dtype, and one more where gradients begin between two loads."""
    if not gradients or not _takes(gradients):
        return reference.total_norm(gradients)
    device = gradients[0].device
    alike: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    addresses: dict[tuple[torch.dtype, bool], list[int]] = {}
    for gradient in gradients:
        gradient = gradient if gradient.is_contiguous() else gradient.contiguous()
        address = gradient.data_ptr()
        kind = gradient.dtype, address % ALIGNMENT == 0
        alike.setdefault(kind, []).append(gradient)
        addresses.setdefault(kind, []).append(address)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    tables = {
        kind: _chunk_table(tuple([one.numel() for one in tensors]), device, stream) for kind, tensors in alike.items()
    }
    parts = torch.empty(sum(table.shape[1] for table in tables.values()), dtype=torch.float32, device=device)
    begin = 0
    for (dtype, aligned), table in tables.items():
        where = _queued(torch.tensor(addresses[dtype, aligned]), device)
        own = parts[begin : begin + table.shape[1]]
        kernels("total_norm").squares(where, table, dtype, own, aligned=aligned)
        begin += len(own)
    return parts.sum().sqrt()


def _takes(gradients: Sequence[Tensor]) -> bool:
    """Whether the kernel can read them all, with its precision."""
    device = gradients[0].device
    return runs_kernel(*gradients) and all(one.device == device and one.dtype in FLOATS for one in gradients)


@functools.lru_cache(maxsize=8)
def _chunk_table(sizes: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """`kernels.total_norm.chunk_table` on the device: 1.2 MB for the 1.7B model, the same at each step.

    stream: the current one, behind which the copy is queued; another one does not wait for it, and gets its own.
    """
    table: Tensor = kernels("total_norm").chunk_table(sizes)
    return _queued(table, device)


def _queued(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for which nobody waits. torch keeps the pinned memory until the stream has passed it."""
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def optim_ops() -> OptimOps:
    """All fields."""
    return OptimOps(total_norm=total_norm)
