"""The runtime calls what torch_npu has for each of its promises; and torch takes the names that it is given."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.ascend.runtime import AscendRuntime
from polyrec.hardware.base.runtime import Runtime

from .standin import Library


@pytest.fixture
def library():
    return Library(num_devices=3)


@pytest.fixture
def runtime(library):
    return AscendRuntime(library, "cpu")


@pytest.fixture
def pinned(monkeypatch):
    """Tensors that were pinned: this machine has no accelerator to pin for."""
    tensors: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensors.append(tensor) or tensor)
    return tensors


def test_it_is_of_the_contract(runtime):
    assert isinstance(runtime, Runtime)
    assert runtime.collective_backend == "hccl"


def test_nothing_is_asked_of_a_device_before_it_is_selected(library, runtime):
    assert library.calls == []
    runtime.select(2)
    assert library.calls == [("set_device", {"device": 2})]
    assert runtime.device.index == 2
    assert runtime.device_name() == "Ascend910B2"
    runtime.enter_thread()
    assert library.calls[-1] == ("set_device", {"device": 2})


@pytest.mark.parametrize("index", [-1, 3])
def test_a_device_that_is_not_there_is_refused(library, runtime, index):
    with pytest.raises(HardwareError, match=r"sees 3, numbered 0…2.*ASCEND_RT_VISIBLE_DEVICES") as caught:
        runtime.select(index)
    assert caught.value.code == "device_index"
    assert library.calls == []


def test_memory_is_of_the_selected_device(runtime):
    runtime.select(1)
    memory = runtime.memory()
    assert (memory.free, memory.total, memory.peak) == (60 * 2**30 - 1, 64 * 2**30, 3 * 2**30 + 1)


def test_streams_and_events_are_torch_npus(library, runtime):
    stream = runtime.stream()
    assert runtime.current_stream() is not stream
    with runtime.use_stream(stream):
        assert runtime.current_stream() is stream
    assert runtime.current_stream() is not stream
    assert isinstance(runtime.event(), library.npu.Event)
    assert [runtime.event(timing=timing).timing for timing in (True, False)] == [True, False]
    library.calls.clear()
    runtime.synchronize()
    runtime.empty_cache()
    assert library.names() == ["synchronize", "empty_cache"]


def test_copies_go_through_pinned_memory(runtime, pinned):
    tensor = torch.arange(4)
    assert torch.equal(runtime.to_device(tensor), tensor)
    assert pinned[0] is tensor
    assert runtime.pin(tensor) is tensor
    assert torch.equal(runtime.to_host(tensor), tensor)


def test_an_asynchronous_copy_has_an_event_on_the_stream_of_the_copy(library, runtime, pinned):
    stream = runtime.stream()
    with runtime.use_stream(stream):
        found, copied = runtime.to_host_async(torch.arange(4))
    assert found is pinned[0]
    assert found.tolist() == [0, 1, 2, 3]
    assert library.calls == [("Event.record", {"stream": stream.name})]
    copied.synchronize()


def test_seed_and_state_repeat_draws_of_host_and_device(library, runtime):
    runtime.seed(5)
    state = runtime.rng_state()
    assert {name: part.dtype for name, part in state.items()} == {"host": torch.uint8, "device": torch.uint8}
    drawn = float(torch.rand(())), library.npu.draw()
    assert (float(torch.rand(())), library.npu.draw()) != drawn
    runtime.set_rng_state(state)
    assert (float(torch.rand(())), library.npu.draw()) == drawn
    runtime.seed(5)
    assert (float(torch.rand(())), library.npu.draw()) == drawn


def test_the_state_of_another_kind_of_platform_is_refused(runtime):
    with pytest.raises(HardwareError) as caught:
        runtime.set_rng_state({"host": torch.get_rng_state()})
    assert caught.value.code == "rng_state_of_another_platform"


def test_ranges_are_ended_also_after_an_error(library, runtime):
    with runtime.range("prefill"):
        pass
    with pytest.raises(ZeroDivisionError), runtime.range("search"):
        raise ZeroDivisionError
    assert library.names() == ["range_start", "range_end"] * 2
    assert library.calls[0][1] == {"message": "prefill"}
    assert library.calls[1][1] == {"range_id": 1}


def test_profiles_show_host_and_device(library, runtime):
    activity = library.profiler.ProfilerActivity
    assert runtime.profiler_activities() == [activity.CPU, activity.NPU]


def test_no_autocast_keeps_every_dtype(runtime):
    with runtime.autocast(None):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_torch_takes_the_device_type_npu_once_it_is_registered():
    """torch_npu registers it when imported; here a process of its own does, so that torch itself judges the names."""
    program = """
        import json, types
        import torch
        from polyrec.hardware.backends.ascend.runtime import AscendRuntime

        module = types.ModuleType("torch.npu")
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
        module.is_available = lambda: True
        torch.utils.rename_privateuse1_backend("npu")
        torch._register_device_module("npu", module)
        library = types.SimpleNamespace(
            npu=types.SimpleNamespace(device_count=lambda: 2, set_device=lambda index: None)
        )
        runtime = AscendRuntime(library)
        first = str(runtime.device)
        runtime.select(1)
        context = runtime.autocast(torch.bfloat16)
        print(json.dumps([first, str(runtime.device), context.device, str(context.fast_dtype)]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["npu:0", "npu:1", "npu", "torch.bfloat16"]
