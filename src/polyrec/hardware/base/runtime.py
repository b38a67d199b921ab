"""What a platform's runtime offers to the layers above: devices, memory numbers, copies, seeds. No layer above calls a
device module itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of one device: free now, in all, and the peak this process has used."""

    free: int
    total: int
    peak: int


class Runtime(ABC):
    """One device of one platform. device: where tensors of this process live."""

    device: torch.device

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the device has done all work queued so far."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Memory numbers of the device."""

    @abstractmethod
    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device, copied asynchronously through pinned memory where the platform has it."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device tensor on the host, complete when this returns."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seeds every generator of the host and the device."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """State of the default generator, uint8."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restores what `rng_state` returned."""

    @abstractmethod
    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        """Mixed precision in `dtype`; None keeps every tensor's own."""

    @property
    @abstractmethod
    def collective_backend(self) -> str:
        """Name of the torch.distributed backend for this device."""
