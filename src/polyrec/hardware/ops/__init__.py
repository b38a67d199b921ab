"""The operations a platform provides, in frozen groups. The functions here are their meaning, in plain torch.

No group has defaults: a platform names an implementation for every field, so adding a field asks every platform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .act import REFERENCE_ACT_OPS, ActOps
from .kv import REFERENCE_KV_OPS, KVOps
from .linear import REFERENCE_LINEAR_OPS, LinearOps
from .loss import REFERENCE_LOSS_OPS, LossOps
from .moe import REFERENCE_MOE_OPS, MoeOps
from .norm import REFERENCE_NORM_OPS, NormOps
from .optim import REFERENCE_OPTIM_OPS, OptimOps
from .rope import REFERENCE_ROPE_OPS, RopeOps
from .sampling import REFERENCE_SAMPLING_OPS, SamplingOps
from .search import REFERENCE_SEARCH_OPS, SearchOps
from .spec import partial_group


@dataclass(frozen=True)
class PlatformOps:
    """All groups of one platform."""

    norm: NormOps
    act: ActOps
    rope: RopeOps
    linear: LinearOps
    kv: KVOps
    search: SearchOps
    sampling: SamplingOps
    moe: MoeOps
    loss: LossOps
    optim: OptimOps


REFERENCE_OPS = PlatformOps(
    norm=REFERENCE_NORM_OPS,
    act=REFERENCE_ACT_OPS,
    rope=REFERENCE_ROPE_OPS,
    linear=REFERENCE_LINEAR_OPS,
    kv=REFERENCE_KV_OPS,
    search=REFERENCE_SEARCH_OPS,
    sampling=REFERENCE_SAMPLING_OPS,
    moe=REFERENCE_MOE_OPS,
    loss=REFERENCE_LOSS_OPS,
    optim=REFERENCE_OPTIM_OPS,
)


def op_groups() -> dict[str, type]:
    """Group name -> its dataclass, in the order of `PlatformOps`."""
    return {name: type(group) for name, group in vars(REFERENCE_OPS).items()}


def partial_ops(**groups: Any) -> PlatformOps:
    """The operations of a platform that has some groups only; every field of the others is `MISSING`."""
    classes = op_groups()
    assert groups.keys() <= classes.keys(), f"PlatformOps has no {sorted(groups.keys() - classes.keys())}"
    return PlatformOps(**{name: groups.get(name) or partial_group(group) for name, group in classes.items()})
