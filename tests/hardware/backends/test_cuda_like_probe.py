"""How the CUDA-like platforms tell the usual traps, on made-up machines with a stand-in for torch."""

from __future__ import annotations

import warnings

import pytest
from stand_in import device_module, machine_with, torch_package

from polyrec.hardware.backends.cuda_like import NvidiaBackend
from polyrec.hardware.backends.cuda_like.variants import MetaxBackend, RocmBackend

DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12.2.0\n"
)
NVIDIA_FILES = {"/proc/driver/nvidia/version": DRIVER, "/dev/nvidiactl": ""}
AMD_CARD = {"/dev/kfd": "", "/sys/class/kfd/kfd/topology/nodes/1/properties": "cpu_cores_count 0\nsimd_count 1216\n"}
AMD_GRAPHICS = {"/dev/kfd": "", "/sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 8\nsimd_count 16\n"}
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver\nby…"


def raising(error: Exception):
    def raises(*_, **__):
        raise error

    return raises


def cuda_torch(**more):
    return torch_package(cuda="12.8", cuda_module=device_module(**more))


def test_nothing_here_is_absent(tmp_path):
    for cls in (NvidiaBackend, MetaxBackend, RocmBackend):
        probe = cls.probe(machine_with(tmp_path, {}), torch_package())
        assert probe.state == "absent", cls
    assert NvidiaBackend.probe(machine_with(tmp_path, {}), cuda_torch(names=())).state == "absent"


def test_a_usable_gpu_is_named_and_flashinfers_absence_noted(tmp_path):
    machine = machine_with(tmp_path, NVIDIA_FILES)
    probe = NvidiaBackend.probe(machine, cuda_torch())
    assert (probe.state, probe.devices) == ("usable", ("Card A", "Card B"))
    assert "flashinfer is absent: attention runs through triton" in probe.reason
    with_it = machine_with(tmp_path, NVIDIA_FILES, {"flashinfer": object()})
    assert NvidiaBackend.probe(with_it, cuda_torch()).reason == ""


@pytest.mark.parametrize(
    ("cls", "files", "package", "says"),
    [
        (
            NvidiaBackend,
            NVIDIA_FILES,
            torch_package(version="2.11.0+cpu"),
            ("the CPU only", "535.104.05", "CUDA build"),
        ),
        (NvidiaBackend, NVIDIA_FILES, torch_package(hip="6.4"), ("AMD's ROCm", "535.104.05")),
        (RocmBackend, AMD_CARD, torch_package(), ("the CPU only", "/dev/kfd", "ROCm build")),
        (RocmBackend, {"/dev/kfd": ""}, torch_package(), ("the CPU only", "/dev/kfd")),
        (MetaxBackend, {"/dev/mxcd": ""}, torch_package(cuda="12.8"), ("NVIDIA's CUDA", "/dev/mxcd", "MetaX's build")),
    ],
)
def test_a_torch_of_another_kind_beside_a_device_has_failed(tmp_path, cls, files, package, says):
    probe = cls.probe(machine_with(tmp_path, files), package)
    assert probe.state == "failed"
    for part in says:
        assert part in probe.reason


def test_integrated_amd_graphics_are_no_failure(tmp_path):
    assert RocmBackend.probe(machine_with(tmp_path, AMD_GRAPHICS), torch_package()).state == "absent"


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_devices_are_said_to_be_hidden(tmp_path, value):
    machine = machine_with(tmp_path, NVIDIA_FILES, CUDA_VISIBLE_DEVICES=value)
    probe = NvidiaBackend.probe(machine, cuda_torch(names=()))
    assert probe.state == "failed"
    assert f"CUDA_VISIBLE_DEVICES={value!r} hides" in probe.reason
    assert NvidiaBackend.probe(machine_with(tmp_path, {}, CUDA_VISIBLE_DEVICES="0"), cuda_torch()).state == "usable"


@pytest.mark.parametrize(
    ("package", "says"),
    [
        (
            cuda_torch(names=(), init=raising(RuntimeError(TOO_OLD))),
            ("The NVIDIA driver 535.104.05 is too old", "12.8", "12020"),
        ),
        (
            cuda_torch(names=(), init=raising(OSError("no libcuda"))),
            ("initialising it failed", "no libcuda", "--gpus all"),
        ),
        (cuda_torch(get_device_name=raising(RuntimeError("ECC"))), ("initialising it failed", "RuntimeError: ECC")),
        (cuda_torch(names=()), ("counts no device", "--gpus all")),
    ],
)
def test_a_driver_that_cannot_be_used_has_failed_with_the_reason(tmp_path, package, says):
    probe = NvidiaBackend.probe(machine_with(tmp_path, NVIDIA_FILES), package)
    assert probe.state == "failed"
    for part in says:
        assert part in probe.reason


def test_what_torch_warns_of_does_not_escape_the_probe(tmp_path):
    def count():
        warnings.warn("CUDA initialization: …", stacklevel=2)
        return 0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package = torch_package(cuda="12.8", cuda_module=device_module(device_count=count))
        assert NvidiaBackend.probe(machine_with(tmp_path, NVIDIA_FILES), package).state == "failed"


def test_one_build_of_torch_is_one_platform(tmp_path):
    everything = {**NVIDIA_FILES, **AMD_CARD, "/dev/mxcd": ""}
    packages = {
        NvidiaBackend: cuda_torch(),
        RocmBackend: torch_package(hip="6.4", cuda_module=device_module()),
        MetaxBackend: torch_package(cuda="11.6", maca="3.8", cuda_module=device_module(names=("MetaX C550",))),
    }
    for owner, package in packages.items():
        states = {cls: cls.probe(machine_with(tmp_path, everything), package).state for cls in packages}
        assert states == {cls: "usable" if cls is owner else "failed" for cls in packages}


def test_a_metax_device_under_a_plain_version_is_not_nvidias(tmp_path):
    probe = NvidiaBackend.probe(machine_with(tmp_path, {}), cuda_torch(names=("MetaX C500",)))
    assert probe.state == "absent"
    assert "metax" in probe.reason


def test_platforms_that_never_ran_say_so():
    assert NvidiaBackend.remark == ""
    for cls in (MetaxBackend, RocmBackend):
        assert "not run on this hardware" in cls.remark
