"""The report of `polyrec devices` as a JSON-able dictionary; docs/devices.md documents its keys, which stay."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import torch

from .. import __version__
from ..core.errors import PolyrecError
from ..hardware import HardwareBackend, HardwareConfig, get_hardware_backend, platform_names
from ..hardware.base.attention import AttentionNeeds, AttentionSupport
from ..hardware.choose import platform_class, probe_platform
from ..hardware.process import fingerprint

Report = dict[str, Any]


def make_report(hardware: HardwareConfig) -> Report:
    """Everything; `chosen` is null and `error` says why where no platform could be chosen or built."""
    chosen, fault = None, None
    try:
        chosen = _chosen(get_hardware_backend(hardware))
    except PolyrecError as error:
        fault = {"code": error.code, "message": error.message, "remedy": error.remedy}
    return {
        "polyrec": __version__,
        "python": platform.python_version(),
        "torch": {"version": torch.__version__, "build": _torch_build()},
        "platforms": [_platform(name) for name in platform_names()],
        "chosen": chosen,
        "error": fault,
    }


def _torch_build() -> dict[str, Any]:
    """Toolkit -> version that torch was built with, under torch's own names; null for what it was built without."""
    said = {name: value for name, value in vars(torch.version).items() if not name.startswith("_")}
    texts = {name: value for name, value in said.items() if value is None or isinstance(value, str)}
    return {name: value for name, value in texts.items() if name != "git_version"}


def _platform(name: str) -> Report:
    """A platform whose module does not import is listed too: its probe has failed with that reason."""
    probe = probe_platform(name)
    try:
        cls = platform_class(name)
        device_type, remark = cls.device_type, cls.remark
    except PolyrecError:  # the probe tells it
        device_type, remark = None, ""
    return {
        "name": name,
        "state": probe.state,
        "reason": probe.reason,
        "devices": list(probe.devices),
        "device_type": device_type,
        "remark": remark,
    }


def _chosen(backend: HardwareBackend) -> Report:
    table = backend.table
    return {
        "platform": backend.platform_name,
        "remark": backend.remark,
        "device": str(backend.runtime.device),
        "devices": _devices(backend),
        "capabilities": {
            name: [_dtype(dtype) for dtype in value] if isinstance(value, tuple) else value
            for name, value in _fields(backend.capabilities).items()
        },
        "attention": _attention(backend),
        "plugins": _plugins(backend),
        "ops": [row.to_dict() for row in table.rows],
        "fallbacks": [row.field for row in table.rows if row.fallback],
        "fingerprint": fingerprint(backend),
    }


def _devices(backend: HardwareBackend) -> list[Report]:
    """Every device by index; memory is asked of this process's own only, since asking another would initialise it."""
    own = backend.runtime.device.index or 0
    names = dict(enumerate(type(backend).probe().devices))
    names[own] = backend.runtime.device_name()
    return [
        {
            "index": index,
            "name": names.get(index, ""),
            "selected": index == own,
            "memory": dataclasses.asdict(backend.runtime.memory()) if index == own else None,
        }
        for index in range(max(backend.runtime.device_count(), own + 1))
    ]


def _attention(backend: HardwareBackend) -> Report:
    """lacking: why a backend cannot run on this platform, whatever the model. picked: what a model gets that needs nothing
    special; one that needs more is refused, or given the next that can, when it is built."""
    choice = backend.attention
    backends = []
    for name in choice.names():
        support, lacking = None, []
        try:
            support = choice.load(name).support
            lacking = support.lacks(_modest_needs(support), backend.platform_name)
        except PolyrecError as error:
            lacking = [str(error)]
        backends.append(
            {
                "name": name,
                "source": choice.plugins[name].source if name in choice.plugins else "built-in",
                "usable": not lacking,
                "lacking": lacking,
                "supports": None if support is None else _support(support),
            }
        )
    usable = {found["name"] for found in backends if found["usable"]}
    picked = next((name for name in choice.candidates() if name in usable), None)
    return {"asked": choice.asked, "picked": picked, "backends": backends}


def _modest_needs(support: AttentionSupport) -> AttentionNeeds:
    """What the backend supports anyhow, so that only the platform can be lacking."""
    head_dim = support.head_dims[0] if support.head_dims else 64
    dtype = support.dtypes[0] if support.dtypes else torch.float32
    return AttentionNeeds(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=head_dim, dtype=dtype)


def _support(support: AttentionSupport) -> Report:
    values = _fields(support)
    if support.dtypes is not None:
        values["dtypes"] = [_dtype(dtype) for dtype in support.dtypes]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _plugins(backend: HardwareBackend) -> list[Report]:
    """What each loaded plugin brought, by its name with distribution and version."""
    brought: dict[str, Report] = {}

    def of(source: str) -> Report:
        return brought.setdefault(source, {"source": source, "ops": [], "attention": []})

    for row in backend.table.rows:
        if row.origin == "plugin":
            of(row.source)["ops"].append(row.field)
    for name, plugin in backend.attention.plugins.items():
        of(plugin.source)["attention"].append(name)
    return list(brought.values())


def _fields(value: Any) -> Report:
    """A dataclass's fields by name, as they are."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
