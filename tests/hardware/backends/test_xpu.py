"""The Intel platform without its hardware: its calls are checked against this torch's own torch.xpu, its probe on made-up
machines."""

from __future__ import annotations

import pytest
import torch
from stand_in import Recorder, device_module, machine_with, torch_package, unknown_calls, use_everything

from polyrec.hardware.backends.cpu.graph import CpuGraph
from polyrec.hardware.backends.cuda_like import CUDA_LIKE_OPS, CudaLikeGraph
from polyrec.hardware.backends.xpu import XpuBackend, intel_gpus
from polyrec.hardware.backends.xpu.runtime import XpuRuntime


def drm(card: int, slot: str, pci_id: str) -> dict[str, str]:
    text = f"DRIVER=xe\nPCI_CLASS=30000\nPCI_ID={pci_id}\nPCI_SLOT_NAME={slot}\n"
    return {f"/sys/class/drm/card{card}/device/uevent": text}


INTEGRATED = drm(0, "0000:00:02.0", "8086:46A6")
ARC = drm(1, "0000:03:00.0", "8086:56A0")
ASPEED = drm(2, "0000:05:00.0", "1A03:2000")


def xpu_torch(**more):
    return torch_package(version="2.11.0+xpu", xpu_build="20250300", xpu_module=device_module(**more))


def raising(error):
    def raises(*_, **__):
        raise error

    return raises


@pytest.mark.skipif(not hasattr(torch.xpu, "XPUGraph"), reason="this torch has no torch.xpu.XPUGraph to compare with")
def test_every_call_is_one_that_torch_xpu_has():
    module = device_module(graph_class="XPUGraph")
    backend = XpuBackend(runtime=XpuRuntime(module))
    use_everything(backend.runtime, backend.graph)
    assert "XPUGraph" in module.names()
    assert len(module.calls) > 30
    assert unknown_calls(module.calls, torch.xpu, "XPUGraph") == []


def test_the_runtimes_calls_are_torch_xpus_in_every_version():
    module = device_module(graph_class=None)
    runtime = XpuRuntime(module)
    use_everything(runtime, CpuGraph())
    assert unknown_calls(module.calls, torch.xpu, "") == []


def test_graphs_are_recorded_where_torch_has_them():
    new, old = (XpuBackend(runtime=XpuRuntime(device_module(graph_class=name))) for name in ("XPUGraph", None))
    assert isinstance(new.graph, CudaLikeGraph)
    assert new.capabilities.captures
    assert isinstance(old.graph, CpuGraph)
    assert not old.capabilities.captures


def test_the_backend_is_built_on_torch_xpu_itself():
    backend = XpuBackend()
    assert backend.runtime.module is torch.xpu
    assert backend.runtime.device == torch.device("xpu", 0)
    assert backend.capabilities.captures is hasattr(torch.xpu, "XPUGraph")


def test_what_differs_from_cuda():
    marks = Recorder(is_available=True, range_push=0, range_pop=0)
    backend = XpuBackend(runtime=XpuRuntime(device_module(), marks=marks))
    assert (backend.platform_name, backend.device_type) == ("xpu", "xpu")
    assert backend.runtime.collective_backend == "xccl"
    assert backend.runtime.profiler_activities()[1] == torch.profiler.ProfilerActivity.XPU
    assert backend.ops is CUDA_LIKE_OPS
    assert "not run on this hardware" in backend.remark
    with backend.runtime.range("name"):
        pass
    assert marks.names() == ["is_available", "range_push", "range_pop"]
    silent = XpuRuntime(device_module(), marks=Recorder(is_available=False))
    with silent.range("name"):
        pass


def test_torchs_itt_has_what_ranges_call():
    assert all(hasattr(torch.profiler.itt, name) for name in ("is_available", "range_push", "range_pop"))


def test_cards_and_integrated_graphics_are_told_apart(tmp_path):
    machine = machine_with(tmp_path, {**INTEGRATED, **ARC, **ASPEED})
    assert intel_gpus(machine) == (["0000:00:02.0"], ["0000:03:00.0"])


@pytest.mark.parametrize(
    ("files", "package", "environment", "state", "says"),
    [
        ({}, torch_package(), {}, "absent", "No Intel GPU card"),
        (ASPEED, torch_package(), {}, "absent", "No Intel GPU card"),
        (INTEGRATED, torch_package(), {}, "absent", "Integrated graphics (0000:00:02.0) may do"),
        (
            ARC,
            torch_package(cuda="12.8"),
            {},
            "failed",
            "built without XPU, on a machine with the Intel GPU 0000:03:00.0",
        ),
        ({}, xpu_torch(names=()), {}, "absent", "no Intel GPU is here"),
        (INTEGRATED, xpu_torch(names=()), {}, "failed", "Level Zero"),
        (
            ARC,
            xpu_torch(names=(), init=raising(RuntimeError("no Level Zero loader"))),
            {},
            "failed",
            "no Level Zero loader",
        ),
        (ARC, xpu_torch(get_device_name=raising(RuntimeError("lost"))), {}, "failed", "RuntimeError: lost"),
        (ARC, xpu_torch(names=()), {"ZE_AFFINITY_MASK": "7"}, "failed", "ZE_AFFINITY_MASK does not hide it"),
        (ARC, xpu_torch(), {}, "usable", ""),
        (INTEGRATED, xpu_torch(), {}, "usable", ""),
    ],
)
def test_the_probe_tells_what_is_wrong(tmp_path, files, package, environment, state, says):
    probe = XpuBackend.probe(machine_with(tmp_path, files, **environment), package)
    assert probe.state == state
    assert says in probe.reason
    assert probe.devices == (("Card A", "Card B") if state == "usable" else ())
