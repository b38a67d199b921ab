"""The hardware of this process: plugins, platform, operations, attention; built before anything else is opened."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from typing import Any

import torch

from .. import __version__
from ..core.config import make_settings
from ..core.errors import HardwareError, PolyrecError
from .attention_choice import AttentionChoice
from .base.backend import HardwareBackend
from .base.config import AUTO, HardwareConfig
from .choose import Choice, asked_device, choose_platform
from .plugin.common import Plugins, configure_plugins
from .plugin.declare import API_VERSION
from .plugin.ops import verify_ops
from .plugin.records import refuse_while_loading
from .table import implementation_name, resolve


@dataclass(frozen=True)
class HardwarePlan:
    """What a parent process runs on, for its workers: picklable, JSON-able by `to_dict`, compared by `fingerprint`.

    rows: the op table. attention: what is asked for, the order of the built-in ones, and the plugins' by name. versions: of
    the packages that built-in operations are of.
    """

    config: HardwareConfig
    platform: str
    fingerprint: str
    rows: tuple[dict[str, Any], ...]
    attention: dict[str, Any]
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; `from_dict` reads it back."""
        return {
            "config": self.config.model_dump(mode="json"),
            "platform": self.platform,
            "fingerprint": self.fingerprint,
            "rows": list(self.rows),
            "attention": self.attention,
            "versions": self.versions,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HardwarePlan:
        """The plan that `to_dict` wrote."""
        config = make_settings(HardwareConfig, values["config"], "the parent's plan")
        rest = (values["attention"], values["versions"])
        return cls(config, values["platform"], values["fingerprint"], tuple(values["rows"]), *rest)


_chosen: list[tuple[HardwareConfig, HardwareBackend]] = []  # one per process, as DESIGN section 5 allows
_choosing = threading.RLock()  # two threads that ask at once get one object


def get_hardware_backend(config: HardwareConfig | None = None, *, plan: HardwarePlan | None = None) -> HardwareBackend:
    """Builds the hardware once per process and returns the same object after; a different config is `hardware_chosen_already`.

    config None: the plan's, else what was chosen before, else auto. plan: the parent's; a worker whose operations differ is
    refused with `plan_differs`. A failure chooses nothing, and what was chosen before stays.
    """
    refuse_while_loading("get_hardware_backend")
    if config is None and plan is not None:
        config = plan.config.model_copy(update={"hardware_platform": plan.platform})
    with _choosing:
        if not _chosen:
            config = config or HardwareConfig()
            backend = build_hardware_backend(config)
            if plan is not None:
                check_plan(backend, plan)
            _chosen.append((config, backend))
            return backend
        earlier, backend = _chosen[0]
    if config is not None:
        _refuse_other(config, earlier, backend)
    if plan is not None:
        check_plan(backend, plan)
    backend.runtime.enter_thread()  # another one may have built it
    return backend


def build_hardware_backend(config: HardwareConfig) -> HardwareBackend:
    """Chooses a platform, loads plugins, builds and verifies. Pure: whatever the process has chosen is left as it is.

    Errors: those of `choose_platform`, `configure_plugins`, `resolve` and `verify_ops`; `platform_build_failed`.
    """
    refuse_while_loading("build_hardware_backend")
    choice = choose_platform(config)
    plugins = configure_plugins(config, choice.cls.platform_name)
    backend = _construct(choice)
    _assemble(backend, plugins, config)
    return backend


def _construct(choice: Choice) -> HardwareBackend:
    """The platform on its device; its probe said yes, so what is raised now is told as the platform's."""
    try:
        backend: HardwareBackend = choice.cls()  # type: ignore[call-arg]  # its own constructor needs no arguments
        backend.runtime.select(choice.index)
    except PolyrecError:
        raise
    except Exception as error:
        raise HardwareError(
            "platform_build_failed",
            f"Platform '{choice.cls.platform_name}' is usable by its probe, and building it on device {choice.index} raised "
            f"{type(error).__name__}: {error}.",
            "See whether another process holds the device and whether torch fits its driver, or choose another platform.",
        ) from error
    return backend


def plan_of(config: HardwareConfig, backend: HardwareBackend) -> HardwarePlan:
    """What a worker of this process must run on."""
    rows = tuple(json.loads(json.dumps(row.to_dict())) for row in backend.table.rows)
    return HardwarePlan(config, backend.platform_name, fingerprint(backend), rows, _attention_of(backend), versions())


def fingerprint(backend: HardwareBackend) -> str:
    """SHA-256 of the platform, its operations and its attention: their implementations, plugins and versions."""
    parts = [backend.platform_name, versions(), backend.table.fingerprint, _attention_of(backend)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """What built-in operations are of, and what plugins are written against."""
    return {"polyrec": __version__, "polyrec.plugin_api": API_VERSION, "torch": str(torch.__version__)}


def check_plan(backend: HardwareBackend, plan: HardwarePlan) -> None:
    """`plan_differs`, with every field whose implementation is another one than in the parent."""
    if fingerprint(backend) == plan.fingerprint:
        return
    here = {row.field: row.to_dict() for row in backend.table.rows}
    parent = {row["field"]: row for row in plan.rows}
    differing = [
        f"{field}: here {_shown(here.get(field))}, in the parent {_shown(parent.get(field))}"
        for field in dict.fromkeys([*here, *parent])
        if json.dumps(here.get(field), sort_keys=True) != json.dumps(parent.get(field), sort_keys=True)
    ]
    own = _attention_of(backend)
    differing += [
        f"attention ({key}): here {own[key]}, in the parent {plan.attention.get(key)}"
        for key in own
        if own[key] != plan.attention.get(key)
    ]
    differing += [
        f"{name}: here {version}, in the parent {plan.versions.get(name)}"
        for name, version in versions().items()
        if version != plan.versions.get(name)
    ]
    raise HardwareError(
        "plan_differs",
        f"This worker (platform '{backend.platform_name}') does not run what its parent ('{plan.platform}') runs. "
        + ("; ".join(differing) or "Their platforms differ")
        + ".",
        "Install the same packages in the same versions for both processes.",
    )


def _attention_of(backend: HardwareBackend) -> dict[str, Any]:
    """What decides which attention a model gets."""
    choice = backend.attention
    plugins = {
        name: f"{implementation_name(plugin.cls)} {plugin.source}" for name, plugin in sorted(choice.plugins.items())
    }
    return {"asked": choice.asked, "order": list(choice.order), "plugins": plugins}


def _shown(row: dict[str, Any] | None) -> str:
    """A row of the op table in a message."""
    if row is None or not row["implementation"]:
        return "absent"
    return f"{row['implementation']} {row['source']}".rstrip() + (
        "" if row["origin"] != "decomposed" else " (fallback)"
    )


def _assemble(backend: HardwareBackend, plugins: Plugins, config: HardwareConfig) -> None:
    """Merges the plugins, checks their numbers, and settles the choice of attention."""
    cls = type(backend)
    table = resolve(cls, backend.ops, plugins.replacements, config.fallback, config.purpose)
    verify_ops(plugins.replacements, backend, config)
    attention = AttentionChoice(config.attention, cls.platform_name, cls.attention_order, plugins.attention)
    attention.check()
    backend.table, backend.ops, backend.attention = table, table.ops, attention


def _refuse_other(config: HardwareConfig, earlier: HardwareConfig, backend: HardwareBackend) -> None:
    """`hardware_chosen_already`, with the settings that differ, where they ask for other hardware than there is."""
    if earlier.purpose == "train":  # what trains also recommends
        config = config.model_copy(update={"purpose": "train"})
    asked, has = _settled(config, backend), _settled(earlier, backend)
    differing = [name for name in type(config).model_fields if getattr(asked, name) != getattr(has, name)]
    if differing:
        raise HardwareError(
            "hardware_chosen_already",
            "This process already runs with "
            + ", ".join(f"{name}={getattr(has, name)!r}" for name in differing)
            + ", and cannot change to "
            + ", ".join(f"{name}={getattr(asked, name)!r}" for name in differing)
            + ".",
            "Start another process for other hardware settings.",
        )


def _settled(config: HardwareConfig, backend: HardwareBackend) -> HardwareConfig:
    """The config as it came out: `auto` on a CPU, `cpu`, `--device cpu:0` and `--gpu 0` are the same, as are plugins in another
    order."""
    kind, index = asked_device(config)
    own = kind in (None, backend.platform_name, backend.device_type)
    return config.model_copy(
        update={
            "hardware_platform": backend.platform_name
            if config.hardware_platform == AUTO
            else config.hardware_platform,
            "device": f"{backend.device_type}:{index}" if own else config.device,
            "gpu": None,
            "allow_cpu": False,
            "extra_ops": tuple(sorted(config.extra_ops)),
            "extra_att": tuple(sorted(config.extra_att)),
        }
    )
