"""Whether this machine can run a CUDA-like platform, and which of the usual traps keeps it from it."""

from __future__ import annotations

import re
import warnings
from typing import Any

from ...base.probe import Probe
from ..machine import Machine
from .differences import Build, Variant, build_of

BUILD_NAMES: dict[Build, str] = {
    "cuda": "NVIDIA's CUDA",
    "hip": "AMD's ROCm",
    "maca": "MetaX's MACA",
    "none": "the CPU only",
}
# What torch and the vendors' libraries raise where a device or driver cannot be used.
DEVICE_ERRORS = (RuntimeError, AssertionError, OSError, ImportError)


def probe_cuda_like(variant: Variant, machine: Machine, torch: Any) -> Probe:
    """Files first, then torch; devices are initialised only where torch counts some, to learn their names."""
    found = find_signs(variant, machine)
    build = build_of(torch)
    if build != variant.build:
        if not found:
            return Probe.absent(f"No sign of {variant.vendor}'s driver ({', '.join(variant.signs)}).")
        return Probe.failed(
            f"torch {torch.__version__} is built for {BUILD_NAMES[build]}, on a machine with"
            f" {_driver(variant, machine, found)}. {variant.install}"
        )
    try:
        names = device_names(torch.cuda)
    except DEVICE_ERRORS as error:
        return Probe.failed(_explain(error, variant, machine, found, torch))
    if any("metax" in name.lower() for name in names) and variant.build == "cuda":
        return Probe.absent(f"The device is {names[0]}: see platform metax.")
    if names:
        return Probe.usable(names)
    if not found:
        return Probe.absent(f"torch is built for {variant.vendor}, and no driver is here ({', '.join(variant.signs)}).")
    if hidden := hidden_by(variant.visible, machine):
        return Probe.failed(hidden)
    return _no_device(variant, machine, found, torch)


def find_signs(variant: Variant, machine: Machine) -> list[str]:
    """The files that tell of the vendor's driver. AMD's /dev/kfd counts where it stands for more than integrated graphics."""
    found = [path for path in variant.signs if machine.exists(path)]
    return [] if found == ["/dev/kfd"] and _integrated_only(machine) else found


def hidden_by(variables: tuple[str, ...], machine: Machine) -> str:
    """Why no device is visible, where a variable hides them all, with what to do; empty where none does."""
    for name in variables:
        value = machine.environment.get(name)
        if value is not None and value.strip() in ("", "-1", "NoDevFiles"):
            return f"{name}={value!r} hides every device. Unset it, or run on the CPU: --hardware-platform cpu."
    return ""


def device_names(module: Any) -> tuple[str, ...]:
    """A name for each device that torch counts; what torch warns of meanwhile is told by the probe's reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(str(module.get_device_name(index)) for index in range(module.device_count()))


def initialisation_error(module: Any) -> Exception | None:
    """What the module raises when it is made to initialise; counting devices keeps silent about it."""
    try:
        module.init()
    except DEVICE_ERRORS as error:
        return error
    return None


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _no_device(variant: Variant, machine: Machine, found: list[str], torch: Any) -> Probe:
    error = initialisation_error(torch.cuda)
    if error is not None:
        return Probe.failed(_explain(error, variant, machine, found, torch))
    return Probe.failed(f"torch counts no device beside {_driver(variant, machine, found)}. {_look(variant)}")


def _explain(error: Exception, variant: Variant, machine: Machine, found: list[str], torch: Any) -> str:
    """An initialisation error with what to do. "too old" is torch's wording (c10/cuda/CUDAFunctions.cpp)."""
    driver = _driver(variant, machine, found)
    driver = driver[0].upper() + driver[1:]
    text = str(error).lower()
    if "driver" in text and ("too old" in text or "insufficient" in text):
        return (
            f"{driver} is too old for this torch ({torch.__version__}, CUDA {torch.version.cuda}): {first_line(error)}"
            " Update the driver, or install a torch built for an older CUDA."
        )
    return f"{driver} is here, and initialising it failed: {first_line(error)} {_look(variant)}"


def _look(variant: Variant) -> str:
    container = "--gpus all" if variant.build == "cuda" else "--device " + " --device ".join(variant.signs)
    return (
        f"In a container, start it with its devices ({container}); on the host, check the driver with the vendor's own"
        " tool and the permissions of the device files."
    )


def _driver(variant: Variant, machine: Machine, found: list[str]) -> str:
    """`the NVIDIA driver 535.104.05`, or the file that tells of it."""
    version = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", machine.read(variant.driver)) if variant.driver else None
    if version:
        return f"the {variant.vendor} driver {version.group()}"
    return f"a {variant.vendor} driver" + (f" ({found[0]})" if found else "")


def _integrated_only(machine: Machine) -> bool:
    """Whether every GPU of the kernel's topology shares its node with CPU cores: a processor's own graphics, which ROCm's
    builds seldom support. False where the topology cannot be read."""
    nodes = [machine.read(path) for path in machine.matches("/sys/class/kfd/kfd/topology/nodes/*/properties")]
    facts = [dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line) for text in nodes]
    gpus = [node for node in facts if int(node.get("simd_count", 0)) > 0]
    return bool(gpus) and all(int(node.get("cpu_cores_count", 0)) > 0 for node in gpus)
