"""The hardware of this process: plugins, platform, operations, attention; built before anything else is opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.config import make_settings
from ..core.errors import HardwareError
from .attention_choice import AttentionChoice
from .base.backend import HardwareBackend
from .base.config import HardwareConfig
from .choose import choose_platform
from .plugin.common import Plugins, configure_plugins
from .plugin.ops import verify_ops
from .table import resolve


@dataclass(frozen=True)
class HardwarePlan:
    """What a parent process runs on, for its workers: JSON-able by `to_dict`, and compared by `fingerprint`."""

    config: HardwareConfig
    platform: str
    fingerprint: str
    rows: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.model_dump(mode="json"),
            "platform": self.platform,
            "fingerprint": self.fingerprint,
            "rows": list(self.rows),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HardwarePlan:
        config = make_settings(HardwareConfig, values["config"], "the parent's plan")
        return cls(config, values["platform"], values["fingerprint"], tuple(values["rows"]))


_chosen: list[tuple[HardwareConfig, HardwareBackend]] = []  # one per process, as DESIGN section 5 allows


def get_hardware_backend(config: HardwareConfig | None = None, *, plan: HardwarePlan | None = None) -> HardwareBackend:
    """Builds the hardware once per process and returns the same object after; a different config is `hardware_chosen_already`.

    config None: the plan's, else what was chosen before, else auto. plan: the parent's; a worker whose operations differ is
    refused with `plan_differs`.
    """
    if config is None and plan is not None:
        config = plan.config.model_copy(update={"hardware_platform": plan.platform})
    if not _chosen:
        config = config or HardwareConfig()
        backend = build_hardware_backend(config)
        if plan is not None:
            check_plan(backend, plan)
        _chosen.append((config, backend))
        return backend
    earlier, backend = _chosen[0]
    if config is not None and _settled(config, backend) != _settled(earlier, backend):
        differing = [name for name in type(config).model_fields if getattr(config, name) != getattr(earlier, name)]
        raise HardwareError(
            "hardware_chosen_already",
            "This process already runs with "
            + ", ".join(f"{name}={getattr(earlier, name)!r}" for name in differing)
            + ", and cannot change to "
            + ", ".join(f"{name}={getattr(config, name)!r}" for name in differing)
            + ".",
            "Start another process for other hardware settings.",
        )
    if plan is not None:
        check_plan(backend, plan)
    return backend


def build_hardware_backend(config: HardwareConfig) -> HardwareBackend:
    """Chooses a platform, loads plugins, builds and verifies. Leaves no trace in the process if anything fails."""
    choice = choose_platform(config)
    plugins = configure_plugins(config, choice.cls.platform_name)
    backend: HardwareBackend = choice.cls()  # type: ignore[call-arg]  # a platform's own constructor needs no arguments
    backend.runtime.select(choice.index)
    _assemble(backend, plugins, config)
    return backend


def plan_of(config: HardwareConfig, backend: HardwareBackend) -> HardwarePlan:
    """What a worker of this process must run on."""
    rows = tuple(row.to_dict() for row in backend.table.rows)
    return HardwarePlan(config, backend.platform_name, fingerprint(backend), rows)


def fingerprint(backend: HardwareBackend) -> str:
    """Of the operations: their implementations, plugins and versions."""
    return backend.table.fingerprint


def check_plan(backend: HardwareBackend, plan: HardwarePlan) -> None:
    """`plan_differs`, with every field whose implementation is another one than in the parent."""
    if backend.platform_name == plan.platform and fingerprint(backend) == plan.fingerprint:
        return
    parent = {row["field"]: row for row in plan.rows}
    differing = [
        f"{row.field}: here {row.implementation or 'absent'} {row.source}".rstrip()
        + f", in the parent {parent.get(row.field, {}).get('implementation') or 'absent'} "
        + str(parent.get(row.field, {}).get("source", ""))
        for row in backend.table.rows
        if (own := row.to_dict()) != {**own, **parent.get(row.field, {"field": ""})}
    ]
    raise HardwareError(
        "plan_differs",
        f"This worker (platform '{backend.platform_name}') does not run what its parent ('{plan.platform}') runs. "
        + "; ".join(part.rstrip() for part in differing),
        "Install the same packages in the same versions for both processes.",
    )


def _assemble(backend: HardwareBackend, plugins: Plugins, config: HardwareConfig) -> None:
    """Merges the plugins, checks their numbers, and settles the choice of attention."""
    cls = type(backend)
    backend.table = resolve(cls, backend.ops, plugins.replacements, config.fallback, config.purpose)
    verify_ops(plugins.replacements, backend, config)
    backend.ops = backend.table.ops
    backend.attention = AttentionChoice(config.attention, cls.platform_name, cls.attention_order, plugins.attention)
    backend.attention.check()


def _settled(config: HardwareConfig, backend: HardwareBackend) -> HardwareConfig:
    """The config with its platform and device as they came out: `auto` on a CPU and `cpu` are the same."""
    from .base.config import AUTO

    auto = config.hardware_platform == AUTO and config.device is None
    platform = backend.platform_name if auto else config.hardware_platform
    return config.model_copy(update={"hardware_platform": platform, "allow_cpu": False})
