"""A hardware backend: one platform's runtime, graph and ops, composed in its constructor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..ops import PlatformOps
from .graph import Graph
from .probe import Probe
from .runtime import Runtime

if TYPE_CHECKING:
    from ..attention_choice import AttentionChoice
    from ..table import OpTable


@dataclass(frozen=True)
class Capabilities:
    """What the layers above may ask instead of a platform's name.

    dtypes: what models may run in. fp8: e4m3 tensors and scaled products. captures: graphs record work on the device (else
    they call the function). async_copies: copies and kernels overlap with the host.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    fp8: bool = False
    captures: bool = False
    async_copies: bool = False


class HardwareBackend:
    """Base of every platform. Parts may come from another backend: all of them, or one of runtime, graph and ops.

    platform_name equals the name it is registered under; device_type is what torch calls its devices. remark: what a user
    should know wherever the platform is listed. attention_order: built-in attention backends, the preferred one first.
    half_by_default: whether a model stored in half precision runs in it unless told otherwise; else it runs in fp32.
    `get_hardware_backend` sets table (with plugins merged, `ops` is its result) and attention.
    """

    platform_name: ClassVar[str]
    device_type: ClassVar[str]
    remark: ClassVar[str] = ""
    attention_order: ClassVar[tuple[str, ...]] = ("sdpa",)
    half_by_default: ClassVar[bool] = True

    table: OpTable
    attention: AttentionChoice

    def __init__(self, *, runtime: Runtime, graph: Graph, ops: PlatformOps, capabilities: Capabilities) -> None:
        self.runtime = runtime
        self.graph = graph
        self.ops = ops
        self.capabilities = capabilities

    @classmethod
    def probe(cls) -> Probe:
        """Whether this machine can run the platform; cheap, and leaves no device initialised that it does not need."""
        raise NotImplementedError(f"{cls.__name__} has no probe.")
