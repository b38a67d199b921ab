"""Whether this machine has an Ascend NPU that can be used, and if not, why: driver, CANN, torch_npu, visible devices."""

from __future__ import annotations

import torch

from ....core.errors import HardwareError
from ...base.probe import Probe
from ..machine import Machine
from .library import NAME, load_library

# Written by the driver's kernel module and its installer (Ascend driver and firmware guide).
DEVICES = "/dev/davinci*"
DRIVER = ("/usr/local/Ascend/driver/version.info", "/usr/local/bin/npu-smi", "/usr/local/sbin/npu-smi")
TOOLKIT = "/usr/local/Ascend"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


def probe_ascend(machine: Machine) -> Probe:
    """Imports torch_npu only where a device is."""
    devices = machine.matches(DEVICES)
    if not devices:
        return _without_device(machine)
    if not machine.has_package(NAME):
        return Probe.failed(
            f"{devices[0]} is here, and this torch {torch.__version__} cannot use it: torch_npu is not installed. "
            f"Install torch_npu {_series(torch.__version__)} and CANN."
        )
    try:
        library = load_library(machine.load)
    except HardwareError as error:
        return Probe.failed(f"{devices[0]} is here. {error}")
    if machine.environment.get(VISIBLE, "all").strip() in ("", "-1"):
        return Probe.failed(
            f"{VISIBLE} hides every NPU from this process. Unset it, or name devices as in {VISIBLE}=0."
        )
    if not library.npu.is_available():
        return Probe.failed(f"{devices[0]} is here, and torch_npu finds no NPU: see what `npu-smi info` says.")
    names = tuple(library.npu.get_device_name(index) for index in range(library.npu.device_count()))
    made_for, here = _series(library.__version__), _series(torch.__version__)
    return Probe.usable(
        names, "" if made_for == here else f"torch_npu {made_for} beside torch {here}: take one series."
    )


def _without_device(machine: Machine) -> Probe:
    driver = next((path for path in DRIVER if machine.exists(path)), None)
    if driver is not None:
        return Probe.failed(
            f"The Ascend driver is here ({driver}), and there is no {DEVICES}: "
            "load the driver, or pass the devices into the container."
        )
    parts = ["CANN is here"] if machine.exists(TOOLKIT) else []
    parts += ["torch_npu is installed"] if machine.has_package(NAME) else []
    return Probe.absent(f"No {DEVICES} on this machine" + (f", although {' and '.join(parts)}." if parts else "."))


def _series(version: str) -> str:
    """`2.9` of `2.9.0.post2+git1`."""
    return ".".join(version.split(".")[:2])
