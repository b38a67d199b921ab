"""Each answer of the probe, on machines made of a folder and a stand-in for torch_npu."""

from __future__ import annotations

import pytest
import torch

from polyrec.hardware.backends.ascend import AscendBackend
from polyrec.hardware.backends.ascend.probe import probe_ascend
from polyrec.hardware.backends.machine import Machine
from polyrec.hardware.base.probe import Probe

from .standin import Library

DEVICE = "/dev/davinci0"
DRIVER = "/usr/local/Ascend/driver/version.info"
TOOLKIT = "/usr/local/Ascend/ascend-toolkit/set_env.sh"


@pytest.fixture
def machine(tmp_path):
    """Makes a machine. library: what importing torch_npu gives; an exception: what it raises; None: not installed."""

    def make(*files, library=None, **environment):
        for file in files:
            path = tmp_path / file.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

        def load(name):
            assert name == "torch_npu"
            if isinstance(library, Exception):
                raise library
            return library

        return Machine(root=tmp_path, environment=environment, find=lambda name: library, load=load)

    return make


@pytest.mark.parametrize(
    ("files", "library", "state", "words"),
    [
        ((), None, "absent", ["No /dev/davinci*"]),
        ((), Library(), "absent", ["although torch_npu is installed"]),
        ((TOOLKIT,), Library(), "absent", ["although CANN is here and torch_npu is installed"]),
        ((DRIVER,), None, "failed", [DRIVER, "no /dev/davinci*", "container"]),
        (("/usr/local/bin/npu-smi",), Library(), "failed", ["npu-smi"]),
        ((DEVICE,), None, "failed", [DEVICE, f"this torch {torch.__version__} cannot use it", "Install torch_npu"]),
        (
            (DEVICE,),
            ImportError("libhccl.so: not found"),
            "failed",
            ["ImportError: libhccl.so: not found", "set_env.sh"],
        ),
        ((DEVICE,), RuntimeError("npu and cuda at once"), "failed", ["RuntimeError: npu and cuda at once"]),
        ((DEVICE,), ModuleNotFoundError("No module named 'yaml'", name="yaml"), "failed", ["'yaml'", "set_env.sh"]),
        ((DEVICE,), ModuleNotFoundError("No module named 'torch_npu'", name="torch_npu"), "failed", ["not installed"]),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(machine, files, library, state, words):
    probe = probe_ascend(machine(*files, library=library))
    assert probe.state == state
    for word in words:
        assert word in probe.reason


def test_a_usable_machine_lists_its_devices(machine):
    assert probe_ascend(machine(DEVICE, library=Library(2))) == Probe("usable", "", ("Ascend910B0", "Ascend910B1"))


def test_probing_sets_no_device(machine):
    library = Library()
    probe_ascend(machine(DEVICE, library=library))
    assert library.calls == []


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_devices_are_named_as_the_reason(machine, visible):
    probe = probe_ascend(machine(DEVICE, library=Library(), ASCEND_RT_VISIBLE_DEVICES=visible))
    assert probe.state == "failed"
    assert "ASCEND_RT_VISIBLE_DEVICES" in probe.reason


def test_a_driver_that_finds_nothing_is_a_failure(machine):
    library = Library()
    library.npu.available = False
    probe = probe_ascend(machine(DEVICE, library=library))
    assert probe.state == "failed"
    assert "npu-smi info" in probe.reason


def test_two_series_side_by_side_are_noted(machine):
    library = Library()
    library.__version__ = "2.1.0.post17"
    probe = probe_ascend(machine(DEVICE, library=library))
    assert probe.state == "usable"
    assert "torch_npu 2.1" in probe.reason


def test_a_machine_without_a_device_imports_nothing(machine):
    assert probe_ascend(machine(library=RuntimeError("imported"))).state == "absent"


def test_the_backend_probes_this_machine():
    probe = AscendBackend.probe()
    assert probe.state in ("usable", "absent", "failed")
    assert probe.state == "usable" or probe.reason
