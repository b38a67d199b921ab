"""The CPU's runtime and graph keep the contracts of `hardware.base`."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.cpu import CpuBackend
from polyrec.hardware.backends.machine import Machine
from polyrec.hardware.base.graph import CapturedGraph, Graph
from polyrec.hardware.base.runtime import Runtime
from polyrec.hardware.ops import REFERENCE_OPS, PlatformOps


@pytest.fixture(scope="module")
def backend():
    return CpuBackend()


def test_parts_are_of_the_contract(backend):
    assert isinstance(backend.runtime, Runtime)
    assert isinstance(backend.graph, Graph)
    assert isinstance(backend.ops, PlatformOps)


def test_every_operation_has_an_implementation(backend):
    for ops in (backend.ops, REFERENCE_OPS):
        for group in dataclasses.fields(ops):
            for field in dataclasses.fields(getattr(ops, group.name)):
                assert callable(getattr(getattr(ops, group.name), field.name)), f"{group.name}.{field.name}"


def test_groups_have_no_defaults():
    """So that a new field asks every platform."""
    for group in dataclasses.fields(PlatformOps):
        for field in dataclasses.fields(getattr(REFERENCE_OPS, group.name)):
            assert field.default is field.default_factory is dataclasses.MISSING, f"{group.name}.{field.name}"


def test_memory_numbers_make_sense(backend):
    memory = backend.runtime.memory()
    assert 0 < memory.free < memory.total
    assert 10 * 2**20 < memory.peak < memory.total  # a process with torch in it is larger than 10 MiB
    ballast = np.ones(8 * 2**20)  # 64 MiB, touched
    assert backend.runtime.memory().peak >= max(memory.peak, ballast.nbytes)


def test_copies_keep_values_and_place(backend):
    tensor = torch.arange(5)
    there = backend.runtime.to_device(tensor)
    assert there.device == backend.runtime.device
    backend.runtime.synchronize()
    assert torch.equal(backend.runtime.to_host(there), tensor)


def test_seed_and_state_repeat_draws(backend):
    runtime = backend.runtime
    runtime.seed(5)
    first = torch.rand(3)
    state = runtime.rng_state()
    assert {name: part.dtype for name, part in state.items()} == {"host": torch.uint8}
    second = torch.rand(3)
    runtime.set_rng_state(state)
    assert torch.equal(torch.rand(3), second)
    runtime.seed(5)
    assert torch.equal(torch.rand(3), first)
    assert not torch.equal(first, second)


def test_autocast(backend):
    x = torch.ones(2, 2)
    with backend.runtime.autocast(torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    with backend.runtime.autocast(None):
        assert (x @ x).dtype == torch.float32


def test_collectives_are_torchs_own_for_the_host(backend):
    assert backend.runtime.collective_backend in torch.distributed.Backend.backend_list
    assert "cpu" in torch.distributed.Backend.backend_capability[backend.runtime.collective_backend]


def test_a_replay_reads_the_buffers_anew(backend):
    buffer, output = torch.zeros(3), torch.zeros(3)

    def double():
        output.copy_(2 * buffer)
        return output

    captured = backend.graph.capture(double)
    assert isinstance(captured, CapturedGraph)
    for value in (1.0, -4.0):
        buffer.fill_(value)
        captured.update({"lengths": buffer})
        assert captured.replay() is output
        assert output.tolist() == [2 * value] * 3


def test_nothing_limits_graphs(backend):
    assert backend.graph.budget() is None
    graphs = [backend.graph.capture(lambda number=number: number) for number in range(50)]
    assert [graph.replay() for graph in graphs] == list(range(50))


def test_generators_of_another_platform_are_refused(backend):
    state = {**backend.runtime.rng_state(), "device": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(HardwareError, match=r"\['device', 'host'\].*\['host'\]") as caught:
        backend.runtime.set_rng_state(state)
    assert caught.value.code == "rng_state_of_another_platform"


def test_the_host_is_one_device(backend):
    runtime = backend.runtime
    assert runtime.device_count() == 1
    runtime.select(0)
    with pytest.raises(HardwareError, match="cpu:1") as caught:
        runtime.select(1)
    assert caught.value.code == "device_index"
    assert runtime.device_name() in str(caught.value)


def test_the_current_stream_is_the_one_in_use_in_its_own_thread(backend):
    runtime = backend.runtime
    default, stream = runtime.current_stream(), runtime.stream()
    seen = []
    with runtime.use_stream(stream):
        assert runtime.current_stream() is stream
        thread = threading.Thread(target=lambda: seen.append(runtime.current_stream()))
        thread.start()
        thread.join()
    assert seen == [default]
    assert runtime.current_stream() is default
    stream.wait_stream(default)
    stream.synchronize()


def test_events_measure_milliseconds(backend):
    start, end = (backend.runtime.event(timing=True) for _ in range(2))
    start.record()
    before = time.perf_counter()
    time.sleep(0.02)
    least = (time.perf_counter() - before) * 1e3
    end.record(backend.runtime.current_stream())
    backend.runtime.stream().wait_event(end)
    end.synchronize()
    assert end.query()
    assert least <= start.elapsed_time(end)
    with pytest.raises(AssertionError, match="timing"):
        start.elapsed_time(backend.runtime.event())


def test_an_asynchronous_copy_is_a_snapshot(backend):
    tensor = torch.arange(4)
    copy, event = backend.runtime.to_host_async(tensor)
    event.synchronize()
    tensor.zero_()
    assert copy.tolist() == [0, 1, 2, 3]
    assert torch.equal(backend.runtime.pin(copy), copy)


def test_a_range_and_the_profiler_are_torchs(backend):
    runtime = backend.runtime
    with torch.profiler.profile(activities=runtime.profiler_activities()) as profile, runtime.range("{braces}"):
        torch.ones(3).sum()
    assert any("sum" in event.key for event in profile.key_averages())
    backend.runtime.empty_cache()


def test_a_closed_graph_is_not_replayed(backend):
    captured = backend.graph.capture(lambda: 1, backend.graph.new_pool())
    captured.close()
    with pytest.raises(AssertionError, match="closed"):
        captured.replay()


def test_capabilities_claim_what_is_true(backend):
    capabilities = backend.capabilities
    claims = {"fp8": capabilities.fp8, "captures": capabilities.captures, "async": capabilities.async_copies}
    assert claims == dict.fromkeys(claims, False)
    for dtype in capabilities.dtypes:
        assert torch.nn.functional.linear(torch.ones(2, 4, dtype=dtype), torch.ones(3, 4, dtype=dtype))[0, 0] == 4


def test_the_probe_names_the_processor(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor: 0\nmodel name\t: Made-up 9000\n")
    probe = CpuBackend.probe(Machine(tmp_path))
    assert probe.state == "usable"
    assert probe.devices[0].startswith("Made-up 9000, ")
    assert CpuBackend.probe(Machine(tmp_path / "nowhere")).devices[0].endswith(" cores")


def test_parts_of_another_backend_are_taken(backend):
    runtime, graph = type(backend.runtime)(), type(backend.graph)()
    other = CpuBackend(runtime=runtime, graph=graph, ops=REFERENCE_OPS)
    assert (other.runtime, other.graph, other.ops) == (runtime, graph, REFERENCE_OPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(2, 0, 3), (4,), (2, 3, 5)])
def test_zeros(backend, dtype, shape):
    found = backend.runtime.zeros(shape, dtype)
    assert (found.shape, found.dtype, found.device.type) == (shape, dtype, "cpu")
    assert not found.float().any()
    found.view(torch.uint8).fill_(1)  # it may be written


def test_zeros_take_memory_when_they_are_written():
    code = """
import resource, torch
from polyrec.hardware.backends.cpu.runtime import CpuRuntime
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
before = peak()
zeros = CpuRuntime().zeros((4, 1 << 27), torch.float32)  # 2 GiB
zeros[2, 5:7] = 1
print(peak() - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 100_000
