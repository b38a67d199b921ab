"""The Moore Threads platform without its hardware: what it asks of torch.musa, and how it tells what is wrong."""

from __future__ import annotations

import pytest
import torch
from stand_in import device_module, machine_with, unknown_calls, use_everything

from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.cpu.graph import CpuGraph
from polyrec.hardware.backends.cuda_like import CUDA_LIKE_OPS, CudaLikeGraph
from polyrec.hardware.backends.musa import MusaBackend
from polyrec.hardware.backends.musa.runtime import MusaRuntime, load_musa

FILES = {"/dev/mtgpu.0": ""}


def runtime_over(module):
    """torch has no device type "musa" until torch_musa takes the place of extensions; this is that place's own name."""
    return MusaRuntime(module, "privateuseone")


def raising(error):
    def raises(*_, **__):
        raise error

    return raises


def test_every_call_is_shaped_as_torch_cudas():
    """torch_musa keeps torch.cuda's signatures, so these are the nearest thing that can be checked here."""
    module = device_module(graph_class="MUSAGraph")
    backend = MusaBackend(runtime=runtime_over(module))
    use_everything(backend.runtime, backend.graph)
    assert module.names().count("MUSAGraph") == 1
    others = [call for call in module.calls if call[0] != "MUSAGraph"]
    assert unknown_calls(others, torch.cuda, "CUDAGraph") == []
    assert ("set_device", (1,), {}) in module.calls
    assert ("Stream", (), {"device": backend.runtime.device}) in module.calls
    assert ("Event", (), {"enable_timing": True}) in module.calls


def test_graphs_are_recorded_where_torch_musa_has_them():
    new, old = (MusaBackend(runtime=runtime_over(device_module(graph_class=name))) for name in ("MUSAGraph", None))
    assert isinstance(new.graph, CudaLikeGraph)
    assert new.capabilities.captures
    assert isinstance(old.graph, CpuGraph)
    assert not old.capabilities.captures
    assert old.graph.capture(lambda: 5).replay() == 5


def test_what_differs_from_cuda():
    backend = MusaBackend(runtime=runtime_over(device_module()))
    assert (backend.platform_name, backend.device_type) == ("musa", "musa")
    assert backend.runtime.collective_backend == "mccl"
    assert backend.runtime.profiler_activities()[0] == torch.profiler.ProfilerActivity.CPU
    assert backend.ops is CUDA_LIKE_OPS
    assert not backend.capabilities.fp8
    assert "not run on this hardware" in backend.remark
    with backend.runtime.range("name"):
        pass
    with pytest.raises(HardwareError) as caught:
        backend.runtime.select(9)
    assert caught.value.code == "device_index"
    assert "MUSA_VISIBLE_DEVICES" in caught.value.remedy


def test_torch_musa_is_the_module_where_torch_has_no_such_name(tmp_path):
    package = device_module()
    assert load_musa(machine_with(tmp_path, {}, {"torch_musa": package})) is package


@pytest.mark.parametrize(
    ("files", "packages", "environment", "state", "says"),
    [
        ({}, {"torch_musa": ImportError("never loaded")}, {}, "absent", "/dev/mtgpu"),
        ({"/dev/mtgpu0": ""}, {}, {}, "failed", "torch_musa is not installed"),
        (FILES, {"torch_musa": ImportError("libmusart.so.1")}, {}, "failed", "ImportError: libmusart.so.1"),
        (
            FILES,
            {"torch_musa": device_module(names=())},
            {"MUSA_VISIBLE_DEVICES": ""},
            "failed",
            "MUSA_VISIBLE_DEVICES='' hides",
        ),
        (FILES, {"torch_musa": device_module(names=())}, {}, "failed", "counts no device beside /dev/mtgpu.0"),
        (
            FILES,
            {"torch_musa": device_module(names=(), init=raising(RuntimeError("bad driver")))},
            {},
            "failed",
            "RuntimeError: bad driver",
        ),
        (FILES, {"torch_musa": device_module()}, {}, "usable", ""),
    ],
)
def test_the_probe_tells_what_is_wrong(tmp_path, files, packages, environment, state, says):
    probe = MusaBackend.probe(machine_with(tmp_path, files, packages, **environment))
    assert probe.state == state
    assert says in probe.reason
    assert probe.devices == (("Card A", "Card B") if state == "usable" else ())
