"""The operations a platform provides, in frozen groups. The functions here are their meaning, in plain torch.

No group has defaults: a platform names an implementation for every field, so adding a field asks every platform.
"""

from __future__ import annotations

from dataclasses import dataclass

from .act import REFERENCE_ACT_OPS, ActOps
from .kv import REFERENCE_KV_OPS, KVOps
from .linear import REFERENCE_LINEAR_OPS, LinearOps
from .loss import REFERENCE_LOSS_OPS, LossOps
from .norm import REFERENCE_NORM_OPS, NormOps
from .rope import REFERENCE_ROPE_OPS, RopeOps
from .search import REFERENCE_SEARCH_OPS, SearchOps


@dataclass(frozen=True)
class PlatformOps:
    """All groups of one platform."""

    norm: NormOps
    act: ActOps
    rope: RopeOps
    linear: LinearOps
    kv: KVOps
    search: SearchOps
    loss: LossOps


REFERENCE_OPS = PlatformOps(
    norm=REFERENCE_NORM_OPS,
    act=REFERENCE_ACT_OPS,
    rope=REFERENCE_ROPE_OPS,
    linear=REFERENCE_LINEAR_OPS,
    kv=REFERENCE_KV_OPS,
    search=REFERENCE_SEARCH_OPS,
    loss=REFERENCE_LOSS_OPS,
)
