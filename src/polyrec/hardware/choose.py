"""Which platform this process runs on: the one named, the one of `--device`, or the accelerator that answers; and which
of its devices."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..core.errors import HardwareError, PolyrecError
from .base.backend import HardwareBackend
from .base.config import AUTO, HardwareConfig
from .base.probe import Probe, ProbeState
from .base.registry import load_platform, platform_names

CPU = "cpu"
_log = logging.getLogger("polyrec.hardware")


@dataclass(frozen=True)
class Choice:
    """A platform's class and the index of its device."""

    cls: type[HardwareBackend]
    index: int


def choose_platform(config: HardwareConfig) -> Choice:
    """Errors: those of `platform_class` and `asked_device`, `platform_unusable`, `probe_failed`, `platforms_ambiguous`,
    `device_platform_differs`, `device_unknown`."""
    device, index = asked_device(config)
    if config.hardware_platform != AUTO:
        cls = platform_class(config.hardware_platform)
        if device not in (None, cls.device_type, cls.platform_name):
            raise HardwareError(
                "device_platform_differs",
                f"--device {config.device} is not of platform '{cls.platform_name}', whose devices are '{cls.device_type}'.",
                f"Write --device {cls.device_type}:{index}, or leave out --hardware-platform.",
            )
        _refuse_unusable(cls.platform_name, probe_platform(cls.platform_name))
        return Choice(cls, index)
    if device in platform_names():
        assert device is not None
        _refuse_unusable(device, probe_platform(device))
        return Choice(platform_class(device), index)
    return Choice(platform_class(_automatic(config, device)), index)


def platform_class(name: str) -> type[HardwareBackend]:
    """The registered class. Errors: `platform_unknown`, `platform_import_failed`, `platform_attribute_missing`,
    `platform_not_a_backend`, `platform_name_differs`."""
    cls = load_platform(name)
    if not (isinstance(cls, type) and issubclass(cls, HardwareBackend)):
        raise HardwareError(
            "platform_not_a_backend",
            f"Platform '{name}' is {cls!r}, not a HardwareBackend class.",
            "Register the path of a subclass of polyrec.hardware.HardwareBackend.",
        )
    if not isinstance(device_type := getattr(cls, "device_type", None), str):
        raise HardwareError(
            "platform_not_a_backend",
            f"Platform '{name}' is {cls!r}, whose device_type is {device_type!r}, and no text.",
            "Set it to what torch calls the platform's devices, such as cuda.",
        )
    called = getattr(cls, "platform_name", None)
    if called != name:
        raise HardwareError(
            "platform_name_differs",
            f"Platform '{name}' is registered as a class that calls itself '{called}'.",
            "Register it under its own platform_name.",
        )
    return cls


def probe_platform(name: str) -> Probe:
    """The platform's own answer; a module that does not import, a probe that raises, and one that returns no Probe are failed
    probes."""
    try:
        probe = platform_class(name).probe()
    except PolyrecError as error:
        return Probe.failed(str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a vendor's library may fail in any way: the others go on)
        return Probe.failed(f"its probe raised {type(error).__name__}: {error}")
    return probe if isinstance(probe, Probe) else Probe.failed(f"its probe returned {probe!r}, which is no Probe.")


def probe_accelerators(device_type: str | None = None) -> dict[str, Probe]:
    """Every platform but the CPU; device_type: only those whose devices torch calls so (classes that do not load stay in)."""
    probes = {name: probe_platform(name) for name in platform_names() if name != CPU}
    if device_type is None:
        return probes
    return {name: probe for name, probe in probes.items() if _device_type(name) in (device_type, None)}


def asked_device(config: HardwareConfig) -> tuple[str | None, int]:
    """What `--device` and `--gpu` say together: torch's name of the type, None where it is left open, and the index.

    Errors: `device_invalid`, `device_index_differs`.
    """
    kind, index = parse_device(config.device)
    if config.gpu is None:
        return kind, index
    if config.device is not None and ":" in config.device and index != config.gpu:
        raise HardwareError(
            "device_index_differs",
            f"--device {config.device} and --gpu {config.gpu} name two devices.",
            "Leave out one of the two.",
        )
    return kind, config.gpu


def parse_device(device: str | None) -> tuple[str | None, int]:
    """`cuda:1` -> ("cuda", 1); the index defaults to 0. Error: `device_invalid`."""
    if device is None:
        return None, 0
    kind, colon, index = device.partition(":")
    if not kind.isidentifier() or (colon and not (index.isascii() and index.isdigit())):
        raise HardwareError(
            "device_invalid", f"--device '{device}' is no device.", "Write TYPE or TYPE:INDEX, as cuda:0."
        )
    return kind, int(index or 0)


def _automatic(config: HardwareConfig, device: str | None) -> str:
    """The accelerator that answers yes; without any, the CPU, unless a probe failed or a device was asked for."""
    probes = probe_accelerators(device)
    usable = [name for name, probe in probes.items() if probe.state == "usable"]
    failed = {name: probe.reason for name, probe in probes.items() if probe.state == "failed"}
    if len(usable) > 1:
        raise HardwareError(
            "platforms_ambiguous",
            f"{len(usable)} platforms are usable here: {', '.join(usable)}.",
            f"Choose one with --hardware-platform {usable[0]}.",
        )
    if usable:
        for name, reason in failed.items():
            _log.warning("[probe_failed] Platform '%s' cannot be used: %s", name, reason)
        return usable[0]
    if device is not None:
        raise HardwareError(
            "device_unknown",
            f"--device {config.device}: no usable platform has devices of type '{device}'. "
            f"{_reasons(probes, 'failed', 'absent')}".strip(),
            "See `polyrec devices`.",
        )
    if failed and not config.allow_cpu:
        raise HardwareError(
            "probe_failed",
            f"No accelerator is usable, and {len(failed)} should be: {_reasons(probes, 'failed')}",
            "Mend it, or run on the CPU on purpose: --hardware-platform cpu or --allow-cpu.",
        )
    for name, reason in failed.items():
        _log.warning("[probe_failed] Platform '%s' cannot be used, so the CPU runs: %s", name, reason)
    return CPU


def _reasons(probes: dict[str, Probe], *states: ProbeState) -> str:
    return " ".join(f"{name}: {probe.reason}" for name, probe in probes.items() if probe.state in states)


def _refuse_unusable(name: str, probe: Probe) -> None:
    if probe.state != "usable":
        raise HardwareError(
            "platform_unusable",
            f"Platform '{name}' cannot run here ({probe.state}): {probe.reason}",
            "See `polyrec devices`, or choose another platform.",
        )


def _device_type(name: str) -> str | None:
    """None where the class cannot be had."""
    try:
        return platform_class(name).device_type
    except PolyrecError:
        return None
