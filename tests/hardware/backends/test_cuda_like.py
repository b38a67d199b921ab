"""CUDA-like platforms without a device: what they ask of torch, how they tell the usual traps, and their ops on the host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from beam_bodies import beam_tests
from stand_in import HostTensor, Recorder, device_module, torch_package, unknown_calls, use_everything

from polyrec.core.errors import HardwareError
from polyrec.hardware.backends import cuda_like
from polyrec.hardware.backends.cpu import CpuBackend
from polyrec.hardware.backends.cuda_like import (
    CUDA_LIKE_OPS,
    CudaLikeBackend,
    CudaLikeGraph,
    CudaLikeRuntime,
    NvidiaBackend,
)
from polyrec.hardware.backends.cuda_like.differences import METAX, NVIDIA, ROCM, build_of
from polyrec.hardware.backends.cuda_like.ops import linear
from polyrec.hardware.backends.cuda_like.ops.linear import multiplies_fp8
from polyrec.hardware.ops import REFERENCE_OPS, op_groups
from polyrec.hardware.ops.check import check_op, map_arguments
from polyrec.hardware.ops.draw import Draw
from polyrec.hardware.ops.search import SearchOps
from polyrec.hardware.ops.spec import FLOATS, group_specs


def raising(error: Exception):
    def raises(*_, **__):
        raise error

    return raises


@pytest.fixture
def module():
    return device_module()


@pytest.fixture
def runtime(module):
    return CudaLikeRuntime(module)


def test_every_call_is_one_that_torch_cuda_has(module, runtime):
    use_everything(runtime, CudaLikeGraph(runtime, module=module))
    with runtime.range("name"):
        pass
    assert len(module.calls) > 30
    assert unknown_calls(module.calls, torch.cuda, "CUDAGraph") == []


def test_a_call_that_torch_lacks_would_be_seen(module):
    calls = [("no_such_function", (), {}), ("mem_get_info", (), {"colour": 1}), ("graph.replay", (1,), {})]
    assert len(unknown_calls(calls, torch.cuda, "CUDAGraph")) == 3


def test_creating_a_backend_initialises_nothing():
    code = (
        "import torch; from polyrec.hardware.backends.cuda_like import CudaLikeRuntime, CudaLikeGraph;"
        "torch.cuda.init = torch.cuda._lazy_init = None;"
        "runtime = CudaLikeRuntime(); CudaLikeGraph(runtime); runtime.seed(3); print(runtime.device)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "cuda:0"


def test_a_runtime_asks_nothing_until_it_is_used(module):
    CudaLikeGraph(CudaLikeRuntime(module), module=module)
    assert module.calls == []


def test_select_makes_the_device_this_processs(module, runtime):
    runtime.select(1)
    assert runtime.device == torch.device("cuda", 1)
    assert ("set_device", (1,), {}) in module.calls
    assert runtime.device_name() == "Card B"
    module.calls.clear()
    runtime.enter_thread()  # torch keeps the current device of each thread
    assert module.calls == [("set_device", (1,), {})]


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_out_of_range_lists_what_there_is(runtime, index):
    with pytest.raises(HardwareError, match=rf"cuda:{index} .*0 \(Card A\), 1 \(Card B\)") as caught:
        runtime.select(index)
    assert caught.value.code == "device_index"
    assert "CUDA_VISIBLE_DEVICES" in caught.value.remedy


def test_copies_go_through_pinned_memory_without_waiting(module, runtime):
    assert runtime.to_device(HostTensor(module.calls)) == "on the device"
    assert module.calls == [("pin_memory", (), {}), ("to", (runtime.device,), {"non_blocking": True})]
    runtime.to_device(HostTensor(module.calls, pinned=True))
    assert module.names() == ["pin_memory", "to", "to"]


def test_a_copy_to_the_host_ends_with_an_event(module, runtime):
    runtime._pinned = lambda shape, dtype: torch.empty(shape, dtype=dtype)  # no device, so no pinned memory
    host, event = runtime.to_host_async(torch.arange(3))
    assert host.tolist() == [0, 1, 2]
    assert module.names() == ["Event", "current_stream", "event.record"]
    assert event.query()


def test_memory_numbers_are_torchs(runtime):
    memory = runtime.memory()
    assert (memory.free, memory.total, memory.peak) == (3 << 30, 8 << 30, 1 << 30)


def test_generators_of_host_and_device_are_kept(module, runtime):
    state = runtime.rng_state()
    assert sorted(state) == ["device", "host"]
    torch.rand(1)
    runtime.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state["host"])
    assert module.calls[-1] == ("set_rng_state", (state["device"], runtime.device), {})
    with pytest.raises(HardwareError) as caught:
        runtime.set_rng_state({"host": state["host"]})
    assert caught.value.code == "rng_state_of_another_platform"


def test_the_small_things(module, runtime):
    assert runtime.collective_backend == "nccl"
    assert runtime.profiler_activities()[1] == torch.profiler.ProfilerActivity.CUDA
    with runtime.autocast(None):
        assert not torch.is_autocast_enabled("cuda")
    with runtime.range("layer {3}"):
        pass
    assert module.calls == [("nvtx.range_push", ("layer {3}",), {}), ("nvtx.range_pop", (), {})]


def test_a_capture_warms_up_records_and_leaves_the_generator(module):
    calls = []
    graph = CudaLikeGraph(module=module, warm_ups=3)
    captured = graph.capture(lambda: calls.append(1), pool="pool")
    assert len(calls) == 4
    names = module.names()
    assert names.index("side.wait_stream") < names.index("get_rng_state") < names.index("set_rng_state")
    assert names.index("set_rng_state") < names.index("graph.capture_begin") < names.index("graph.capture_end")
    assert ("graph.capture_begin", ("pool",), {}) in module.calls
    assert names[-2:] == ["set_stream", "default.wait_stream"]
    captured.replay()
    assert module.names()[-1] == "graph.replay"
    assert len(calls) == 4
    graph.capture(lambda: calls.append(2))
    assert calls[4:] == [2, 2], "one warm-up from now on"


def test_a_capture_in_pieces_replays_and_closes_all_of_them(module):
    graph = CudaLikeGraph(module=module, warm_ups=1)

    def function():
        for _ in range(2):
            module.calls.append(("work", (), {}))
            graph.split()
        return 5

    captured = graph.capture(function, pool="pool")
    names = module.names()
    piece = ["graph.capture_begin", "work", "graph.capture_end"]
    begin = names.index("graph.capture_begin")
    assert names[:begin].count("work") == 2, "a warm-up is not split"
    kept = [name for name in names[begin:] if name in ("work", "graph.capture_begin", "graph.capture_end")]
    assert kept == [*piece, *piece, "graph.capture_begin", "graph.capture_end"]
    assert module.calls.count(("graph.capture_begin", ("pool",), {})) == 3
    assert captured.replay() == 5
    assert module.names()[-3:] == ["graph.replay"] * 3
    captured.close()
    assert module.names()[-3:] == ["graph.reset"] * 3
    graph.split()
    assert module.names()[-1] == "graph.reset", "outside a capture nothing is split"


def test_a_piece_that_fails_takes_those_before_it_along(module):
    graph = CudaLikeGraph(module=module, warm_ups=0, max_graphs=1)

    def function():
        graph.split()
        raise ValueError("in the second piece")

    with pytest.raises(HardwareError, match="in the second piece"):
        graph.capture(function)
    names = module.names()
    assert names.count("graph.capture_begin") == names.count("graph.capture_end") == 3  # the last mends the generator
    assert names.count("graph.reset") == 2, "the first piece, and the mending one"
    assert graph.budget() == 1
    module.calls.clear()
    graph.capture(lambda: None).replay()
    assert module.names().count("graph.capture_begin") == 1


def test_all_captures_record_on_one_stream(module):
    """The allocator shares a pool's memory within one stream only."""
    graph = CudaLikeGraph(module=module)
    for _ in range(3):
        graph.capture(lambda: None)
    assert module.names().count("Stream") == 1


def test_the_budget_is_kept_and_closing_frees_a_place(module):
    graph = CudaLikeGraph(module=module, max_graphs=2)
    first = graph.capture(lambda: 1)
    graph.capture(lambda: 2)
    assert graph.budget() == 0
    with pytest.raises(HardwareError, match="budget is 2") as caught:
        graph.capture(raising)
    assert caught.value.code == "graph_budget_exhausted"
    first.close()
    first.close()
    assert graph.budget() == 1
    assert module.names().count("graph.reset") == 1
    with pytest.raises(AssertionError, match="closed"):
        first.replay()
    graph.capture(lambda: 3)
    assert CudaLikeGraph(module=module).budget() is None


def test_a_failed_capture_keeps_the_cause_and_the_process(module):
    counted = []

    def reads_a_value():
        counted.append(1)
        if len(counted) == 3:  # after two warm-ups
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graph = CudaLikeGraph(module=module, max_graphs=1)
    before = module.current_stream()
    with pytest.raises(
        HardwareError, match=r"reads_a_value.*RuntimeError: operation not permitted when stream is capturing In a"
    ) as caught:
        graph.capture(reads_a_value)
    assert caught.value.code == "graph_capture_failed"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert module.current_stream() is before
    assert module.names().count("graph.capture_begin") == module.names().count("graph.capture_end") == 2
    assert graph.budget() == 1


@pytest.mark.parametrize("call", [1, 3], ids=["warming up", "captured"])
def test_a_graph_without_room_is_refused_with_what_leaves_more(module, call):
    calls = []

    def asks_for_memory():
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    before = module.current_stream()
    with pytest.raises(HardwareError, match=r"asks_for_memory.*2\.00 GiB") as caught:
        CudaLikeGraph(module=module).capture(asks_for_memory)
    assert caught.value.code == "graph_memory_exceeded"
    assert module.current_stream() is before


@pytest.mark.parametrize("within", [True, False], ids=["in the function", "at the capture's end"])
def test_torchs_allocator_is_told_that_a_broken_capture_has_ended(monkeypatch, within):
    """And the first error is the cause, not that the capture it broke cannot be ended."""
    module = device_module()
    ends = iter([RuntimeError("capture was invalidated"), None])

    def capture_end():
        if (error := next(ends)) is not None:
            raise error

    parts = {"capture_begin": None, "capture_end": capture_end, "reset": None}
    module._results["CUDAGraph"] = lambda: Recorder(module.calls, "graph.", **parts)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: module.calls.append(("end_pool", args, {})))
    function = raising(ValueError("the reason")) if within else (lambda: None)
    with pytest.raises(HardwareError) as caught:
        CudaLikeGraph(module=module, warm_ups=0).capture(function)
    assert isinstance(caught.value.__cause__, ValueError if within else RuntimeError)
    assert ("end_pool", (0, (0, 7)), {}) in module.calls


def test_a_capture_that_cannot_begin_needs_no_mending():
    module = device_module(graph_parts={"capture_begin": raising(RuntimeError("already capturing"))})
    with pytest.raises(HardwareError, match="already capturing"):
        CudaLikeGraph(module=module, warm_ups=0).capture(lambda: None)
    assert module.names().count("graph.capture_begin") == 1


def test_an_error_of_a_warm_up_is_the_functions_own(module):
    with pytest.raises(ValueError, match="own"):
        CudaLikeGraph(module=module).capture(raising(ValueError("own")))
    assert "graph.capture_begin" not in module.names()


# --- ops


def test_all_ops_and_each_group_are_public():
    assert {name.split("_")[2].lower() for name in cuda_like.__all__ if name.startswith("CUDA_LIKE_")} - {"ops"} == set(
        op_groups()
    )
    for name in op_groups():
        assert getattr(cuda_like, f"CUDA_LIKE_{name.upper()}_OPS") is getattr(CUDA_LIKE_OPS, name)


@pytest.mark.parametrize(
    "body", [pytest.param(body, id=name) for name, body in beam_tests(CUDA_LIKE_OPS.search.beam_step)]
)
def test_the_dense_beam_step_passes_the_references_tests(body):
    body()


def test_those_are_the_references_tests():
    names = {name.partition("[")[0] for name, _ in beam_tests(CUDA_LIKE_OPS.search.beam_step)}
    assert {"test_a_step_equals_plain_python", "test_order_across_signs_and_zeros"} <= names

    def nothing(*_):
        raise NotImplementedError

    for name, body in beam_tests(nothing):
        with pytest.raises(NotImplementedError):
            body()
        assert name


@pytest.mark.parametrize("step", [REFERENCE_OPS.search.beam_step, CUDA_LIKE_OPS.search.beam_step])
@pytest.mark.parametrize("full", [False, True])
def test_no_shape_of_the_beam_step_depends_on_values(step, full):
    """On torch's meta device tensors have shapes and no values, so whatever needs a value raises, as the reference does."""
    for case in group_specs(SearchOps)["beam_step"].cases(Draw(torch.float32, full=full)):
        case = map_arguments(lambda tensor: tensor.to("meta"), case)
        if step is REFERENCE_OPS.search.beam_step:
            with pytest.raises((RuntimeError, NotImplementedError)):
                step(*case.values())
        else:
            beams = step(**case)
            assert beams.node.shape == (*case["logits"].shape[:1], case["width"])


def differing_ops():
    """`group.field` of what is not the reference itself."""
    for group, cls in op_groups().items():
        for field, spec in group_specs(cls).items():
            function = getattr(getattr(CUDA_LIKE_OPS, group), field)
            if function is not spec.reference:
                yield pytest.param(f"{group}.{field}", spec, function, id=f"{group}.{field}")


@pytest.mark.parametrize(("field", "spec", "function"), list(differing_ops()))
def test_ops_of_its_own_conform_on_the_host(field, spec, function):
    host = CpuBackend()
    faults = check_op(
        field, spec, function, runtime=host.runtime, graph=host.graph, dtypes=FLOATS, train=True, level="full"
    )
    assert faults == []


def test_scaled_mm_asks_the_device_whether_it_multiplies_fp8():
    assert not multiplies_fp8(torch.device("cpu"))
    assert CUDA_LIKE_OPS.linear.scaled_mm is not REFERENCE_OPS.linear.scaled_mm


@pytest.mark.parametrize(
    ("hopper", "before", "after"), [(True, None, "0"), (True, "4096", "4096"), (False, None, None)]
)
def test_products_ask_for_no_work_space_where_that_was_measured(monkeypatch, hopper, before, after):
    monkeypatch.setattr(linear, "is_tuned", lambda device: hopper)
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", before or "")  # and what it was before comes back
    if before is None:
        monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE")
    linear._ask_for_no_workspace.__wrapped__(torch.device("cpu"))
    assert os.environ.get("CUBLASLT_WORKSPACE_SIZE") == after


# --- backends


def test_parts_may_be_another_backends(module):
    host = CpuBackend()
    runtime = CudaLikeRuntime(module)
    mixed = NvidiaBackend(runtime=runtime, graph=host.graph, ops=REFERENCE_OPS)
    assert (mixed.runtime, mixed.graph, mixed.ops) == (runtime, host.graph, REFERENCE_OPS)
    own = NvidiaBackend()
    assert isinstance(own.runtime, CudaLikeRuntime)
    assert isinstance(own.graph, CudaLikeGraph)
    assert own.ops.sampling is CUDA_LIKE_OPS.sampling


def test_a_vendor_is_a_subclass_with_another_name():
    class OtherBackend(CudaLikeBackend):
        platform_name = "other"

    backend = OtherBackend()
    assert backend.device_type == "cuda"
    assert backend.capabilities.captures
    assert not backend.capabilities.fp8


@pytest.mark.parametrize(
    ("variant", "capability", "bf16", "fp8"),
    [
        (NVIDIA, (7, 5), False, False),
        (NVIDIA, (8, 0), True, False),
        (NVIDIA, (8, 9), True, True),
        (NVIDIA, (12, 0), True, True),
        (METAX, (8, 0), True, False),
        (ROCM, (9, 4), True, False),
    ],
)
def test_capabilities_follow_the_compute_capability(variant, capability, bf16, fp8):
    found = cuda_like.capabilities_of(variant, device_module(get_device_capability=capability))
    assert (torch.bfloat16 in found.dtypes) is bf16
    assert found.fp8 is fp8


@pytest.mark.parametrize(
    ("package", "build"),
    [
        (torch_package(cuda="12.8"), "cuda"),
        (torch_package(version="2.11.0+cpu"), "none"),
        (torch_package(hip="6.4"), "hip"),
        (torch_package(cuda="11.6", maca="3.8.1.0"), "maca"),
        (torch_package(version="2.8.0+metax3.5.3.9", cuda="11.6"), "maca"),
    ],
)
def test_whose_torch_is_installed(package, build):
    assert build_of(package) == build
