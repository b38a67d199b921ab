"""CUDA-like platforms on a device: runtime, graphs, generators, and every operation against its reference with capture."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys

import pytest
import torch
from beam_bodies import beam_tests

from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.cuda_like import CUDA_LIKE_OPS, CudaLikeBackend, CudaLikeGraph, NvidiaBackend
from polyrec.hardware.backends.cuda_like.ops.linear import is_tuned, multiplies_fp8
from polyrec.hardware.backends.cuda_like.variants import MetaxBackend, RocmBackend
from polyrec.hardware.ops import op_groups
from polyrec.hardware.ops.check import check_op, map_arguments
from polyrec.hardware.ops.search import beam_step as reference_beam_step
from polyrec.hardware.ops.spec import claims_of, group_specs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda"),
]
MEBI = 1 << 20


@pytest.fixture(scope="module")
def backend() -> CudaLikeBackend:
    usable = [cls for cls in (NvidiaBackend, MetaxBackend, RocmBackend) if cls.probe().state == "usable"]
    assert len(usable) == 1, "a device that torch counts belongs to one platform"
    built = usable[0]()
    built.runtime.select(0)
    return built


@pytest.fixture
def runtime(backend):
    return backend.runtime


@pytest.fixture
def device(runtime):
    return runtime.device


def long_work(device, times=40):
    """Keeps the device busy long after the host has gone on."""
    x = torch.ones(4096, 4096, device=device)
    for _ in range(times):
        x = (x @ x).clamp_(-1, 1)
    return x


# --- runtime


def test_the_device_has_a_name_and_a_place(backend, runtime):
    assert runtime.device_name() in backend.probe().devices
    assert runtime.device.index == torch.cuda.current_device() == 0
    with pytest.raises(HardwareError, match="0 \\(") as caught:
        runtime.select(runtime.device_count())
    assert caught.value.code == "device_index"


def test_copies_keep_values(runtime):
    tensor = torch.randn(1000, 7)
    there = runtime.to_device(tensor)
    assert there.device == runtime.device
    assert torch.equal(runtime.to_host(there), tensor)
    assert runtime.pin(tensor).is_pinned()


def test_many_copies_in_a_row_do_not_share_pinned_memory(runtime):
    """The pinned copy is dropped while its transfer still waits behind other work."""
    long_work(runtime.device)
    there = [runtime.to_device(torch.full((256, 1024), float(number))) for number in range(50)]
    assert [float(tensor.mean()) for tensor in there] == [float(number) for number in range(50)]


def test_an_asynchronous_copy_is_whole_once_its_event_is_passed(runtime):
    value = long_work(runtime.device).fill_(3)
    host, event = runtime.to_host_async(value)
    value.zero_()  # after the copy in the stream's order
    event.synchronize()
    assert event.query()
    assert host.is_pinned()
    assert bool((host == 3).all())


def test_events_are_in_the_streams_order(runtime):
    start, end = runtime.event(timing=True), runtime.event(timing=True)
    start.record()
    long_work(runtime.device)
    end.record(runtime.current_stream())
    assert not end.query(), "the host should be ahead of so much work"
    end.synchronize()
    assert start.elapsed_time(end) > 0


def test_a_stream_waits_for_an_event_of_another(runtime):
    side = runtime.stream()
    buffer = torch.zeros(1, device=runtime.device)
    runtime.synchronize()
    with runtime.use_stream(side):
        assert runtime.current_stream() == side
        long_work(runtime.device)
        buffer.fill_(7)
        filled = runtime.event()
        filled.record(side)
    runtime.current_stream().wait_event(filled)
    assert float(buffer.clone()) == 7


def test_memory_numbers_move(runtime):
    gc.collect()
    runtime.empty_cache()
    before = runtime.memory()
    assert 0 < before.free < before.total
    ballast = torch.zeros(256 * MEBI, dtype=torch.uint8, device=runtime.device)
    held = runtime.memory()
    assert held.free <= before.free - 200 * MEBI
    assert held.peak >= ballast.nbytes
    del ballast
    runtime.empty_cache()
    after = runtime.memory()
    assert after.free >= held.free + 200 * MEBI
    assert after.peak >= held.peak


def draw(device):
    return torch.rand(3), torch.rand(3, device=device).cpu()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_seed_and_state_repeat_draws_of_host_and_device(runtime, device):
    runtime.seed(5)
    first = draw(device)
    state = runtime.rng_state()
    assert {name: (part.dtype, part.device.type) for name, part in state.items()} == {
        "host": (torch.uint8, "cpu"),
        "device": (torch.uint8, "cpu"),
    }
    second = draw(device)
    runtime.set_rng_state(state)
    assert same(draw(device), second)
    runtime.seed(5)
    assert same(draw(device), first)
    assert not same(first, second)


def test_autocast_ranges_and_the_profiler_reach_the_device(runtime, device):
    x = torch.ones(8, 8, device=device)
    with runtime.autocast(torch.bfloat16), runtime.range("{a name}"):
        assert (x @ x).dtype == torch.bfloat16
    with torch.profiler.profile(activities=runtime.profiler_activities()) as profile:
        (x @ x).sum()
        runtime.synchronize()
    assert any(event.device_type != torch.autograd.DeviceType.CPU for event in profile.events())


# --- graphs


@pytest.fixture
def graph(runtime):
    return CudaLikeGraph(runtime)


def test_a_replay_reads_its_buffers(graph, device):
    buffer = torch.zeros(4, device=device)
    captured = graph.capture(lambda: buffer * 2 + 1)
    for value in (3.0, -5.0):
        buffer.fill_(value)
        captured.update({})
        assert captured.replay().tolist() == [2 * value + 1] * 4
    captured.close()
    with pytest.raises(AssertionError, match="closed"):
        captured.replay()


def test_replays_draw_what_eager_calls_would(graph, runtime, device):
    captured = graph.capture(lambda: torch.rand(5, device=device))
    runtime.seed(11)
    eager = [torch.rand(5, device=device) for _ in range(4)]
    runtime.seed(11)
    mixed = [
        captured.replay().clone(),
        torch.rand(5, device=device),
        captured.replay().clone(),
        captured.replay().clone(),
    ]
    assert same(mixed, eager)


def test_capturing_draws_nothing(graph, runtime, device):
    runtime.seed(12)
    expected = torch.rand(5, device=device)
    runtime.seed(12)
    graph.capture(lambda: torch.rand(100, device=device))
    assert torch.equal(torch.rand(5, device=device), expected)


def fails_after_a_draw(device):
    return torch.rand(5, device=device).sum().item()


def test_a_failed_capture_leaves_the_process_usable(graph, runtime, device):
    before = graph.capture(lambda: torch.rand(5, device=device))
    stream = runtime.current_stream()
    runtime.seed(13)
    expected = [torch.rand(5, device=device) for _ in range(3)]
    runtime.seed(13)
    with pytest.raises(HardwareError, match="fails_after_a_draw") as caught:
        graph.capture(lambda_of(fails_after_a_draw, device))
    assert caught.value.code == "graph_capture_failed"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert runtime.current_stream() == stream
    # Eager draws, graphs from before and new ones all go on, on one generator that no draw has moved.
    after = graph.capture(lambda: torch.rand(5, device=device))
    assert same([torch.rand(5, device=device), before.replay().clone(), after.replay().clone()], expected)
    runtime.synchronize()


def lambda_of(function, device):
    def fails_after_a_draw():
        return function(device)

    return fails_after_a_draw


def test_failing_again_and_again_is_no_different(graph, device):
    for _ in range(5):
        with pytest.raises(HardwareError):
            graph.capture(lambda_of(fails_after_a_draw, device))
    assert graph.capture(lambda: torch.ones(2, device=device) + 1).replay().tolist() == [2, 2]


def test_a_failed_capture_does_not_keep_the_allocator_from_giving_back(graph, runtime, device):
    with pytest.raises(HardwareError):
        graph.capture(lambda_of(fails_after_a_draw, device))
    ballast = torch.zeros(256 * MEBI, dtype=torch.uint8, device=device)
    side = runtime.stream()
    side.wait_stream(runtime.current_stream())
    ballast.record_stream(side)  # its memory is free once an event is passed, and events wait for captures to end
    held = runtime.memory().free
    del ballast
    runtime.synchronize()
    runtime.empty_cache()
    assert runtime.memory().free >= held + 200 * MEBI


def test_a_closed_graph_frees_its_place_and_memory(runtime, device):
    graph = CudaLikeGraph(runtime, max_graphs=1)
    captured = graph.capture(lambda: torch.zeros(128 * MEBI, dtype=torch.uint8, device=device) + 1)
    assert graph.budget() == 0
    with pytest.raises(HardwareError) as caught:
        graph.capture(lambda: None)
    assert caught.value.code == "graph_budget_exhausted"
    gc.collect()
    runtime.empty_cache()
    held = runtime.memory().free
    captured.close()
    gc.collect()
    runtime.empty_cache()
    assert runtime.memory().free >= held + 100 * MEBI
    assert graph.budget() == 1


def reserved_by(graph, pool, device, count=6):
    """Bytes that capturing `count` graphs, each with 64 MiB of scratch, adds to what the allocator holds."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def scratch():
        return (torch.zeros(64 * MEBI, dtype=torch.uint8, device=device) + 1)[:1].clone()

    captured = [graph.capture(scratch, pool) for _ in range(count)]
    torch.cuda.empty_cache()
    used = torch.cuda.memory_reserved() - before
    results = [int(one.replay()) for one in captured]
    assert results == [1] * count
    for one in captured:
        one.close()
    return used


def test_graphs_of_one_pool_share_memory(graph, device):
    shared, own = reserved_by(graph, graph.new_pool(), device), reserved_by(graph, None, device)
    assert shared * 3 < own, f"{shared / MEBI:.0f} MiB shared, {own / MEBI:.0f} MiB apart"


def test_graphs_of_one_pool_keep_their_results_apart(graph, device):
    pool = graph.new_pool()
    captured = [graph.capture(lambda value=value: torch.full((9,), value, device=device), pool) for value in (1.0, 2.0)]
    results = [one.replay() for one in captured]
    assert [result.tolist() for result in results] == [[1.0] * 9, [2.0] * 9]


# --- operations


def on_device(step, runtime):
    """The step with its arguments moved to the device, and its result back."""

    def moved(*args):
        arguments = map_arguments(runtime.to_device, dict(enumerate(args)))
        return map_arguments(runtime.to_host, {0: step(*arguments.values())})[0]

    return moved


@pytest.mark.parametrize("name", [name for name, _ in beam_tests(CUDA_LIKE_OPS.search.beam_step)])
def test_the_beam_step_passes_the_references_tests(runtime, name):
    dict(beam_tests(on_device(CUDA_LIKE_OPS.search.beam_step, runtime)))[name]()


def test_a_captured_beam_step_equals_the_reference_on_new_values(graph, runtime):
    for case, other in zip(beam_cases(0), beam_cases(1), strict=True):
        if case["normalizer"] is None:
            continue  # sums in another order; `check_op` compares those
        buffers = map_arguments(lambda tensor: runtime.to_device(tensor.clone()), case)
        captured = graph.capture(lambda buffers=buffers: CUDA_LIKE_OPS.search.beam_step(**buffers))
        map_pairs(lambda place, value: place.copy_(runtime.to_device(value)), buffers, other)
        found, expected = captured.replay(), reference_beam_step(**other)
        for part in ("score", "node", "parent"):
            assert torch.equal(getattr(found, part).cpu(), getattr(expected, part)), part


def beam_cases(seed):
    from polyrec.hardware.ops.draw import Draw
    from polyrec.hardware.ops.search import SearchOps

    return group_specs(SearchOps)["beam_step"].cases(Draw(torch.float32, seed, full=True))


def map_pairs(function, one, other):
    from polyrec.hardware.ops.compare import tensors

    for name in one:
        for (_, a), (_, b) in zip(tensors(one[name], name), tensors(other[name], name), strict=True):
            function(a, b)


def every_op():
    for group, cls in op_groups().items():
        for field, spec in group_specs(cls).items():
            yield pytest.param(
                f"{group}.{field}", spec, getattr(getattr(CUDA_LIKE_OPS, group), field), id=f"{group}.{field}"
            )


@pytest.mark.parametrize(("field", "spec", "function"), list(every_op()))
def test_every_op_conforms_with_capture(backend, field, spec, function):
    faults = check_op(
        field,
        spec,
        function,
        runtime=backend.runtime,
        graph=backend.graph,
        dtypes=backend.capabilities.dtypes,
        train=True,
        level="full",
    )
    assert faults == [], "\n".join(map(str, faults))


def test_the_search_can_be_captured():
    assert claims_of(CUDA_LIKE_OPS.search.beam_step).graph_safe is not False


def test_scaled_mm_runs_on_the_devices_own_products(backend, device):
    """Not on the reference in disguise: the profile shows no conversion of the weight."""
    if not backend.capabilities.fp8:
        pytest.skip("this device has no products of e4m3 tensors")
    assert multiplies_fp8(device)
    quantize = CUDA_LIKE_OPS.linear.quantize_fp8
    (q, q_scale), (weight, weight_scale) = (quantize(torch.randn(rows, 256, device=device)) for rows in (48, 64))
    with torch.profiler.profile(activities=backend.runtime.profiler_activities()) as profile:
        CUDA_LIKE_OPS.linear.scaled_mm(q, q_scale, weight, weight_scale, None, torch.bfloat16)
        backend.runtime.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_mm" in names
    assert "aten::_to_copy" not in names


NO_MEMSET = """
import torch
from polyrec.hardware.backends.cuda_like import CUDA_LIKE_OPS, NvidiaBackend

backend = NvidiaBackend()
backend.runtime.select(0)
quantize = CUDA_LIKE_OPS.linear.quantize_fp8
(q, q_scale), (weight, weight_scale) = (quantize(torch.randn(rows, 2048, device="cuda")) for rows in (2560, 12288))
graph = backend.graph.capture(
    lambda: CUDA_LIKE_OPS.linear.scaled_mm(q, q_scale, weight, weight_scale, None, torch.bfloat16)
)
with torch.profiler.profile(activities=backend.runtime.profiler_activities()) as profile:
    graph.replay()
    backend.runtime.synchronize()
print(sorted({event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}))
"""


def test_no_memset_stands_before_a_captured_scaled_mm(device):
    """In a process of its own: torch reads once how much work space there is."""
    if not is_tuned(device):
        pytest.skip("only on Hopper is it asked for")
    environment = {name: value for name, value in os.environ.items() if name != "CUBLASLT_WORKSPACE_SIZE"}
    run = subprocess.run([sys.executable, "-c", NO_MEMSET], capture_output=True, text=True, env=environment, check=True)
    kernels = ast.literal_eval(run.stdout.splitlines()[-1])
    assert kernels
    assert not [name for name in kernels if "memset" in name.lower()]
