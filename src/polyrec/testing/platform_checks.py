"""What every platform's runtime and graphs must do, as functions that raise AssertionError.

`testing.conformance` runs them under pytest; PLATFORM_CHECKS lists them all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..core.errors import HardwareError
from ..engine.recommender import Recommender
from ..hardware import HardwareBackend, HardwareConfig, build_hardware_backend
from .tiny import write_tiny_model

COPIED = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
_FEW_GRAPHS = 64  # a budget up to this is used up to its end


def check_identity(hardware: HardwareBackend) -> None:
    """Names, probe and devices agree, and a device that is not there is refused."""
    runtime = hardware.runtime
    probe = hardware.probe()
    assert probe.state == "usable", f"the platform was built, and its probe says {probe.state}: {probe.reason}"
    assert len(probe.devices) == runtime.device_count() >= 1, (
        f"{probe.devices} are not {runtime.device_count()} devices"
    )
    assert runtime.device_name(), "the device has no name"
    try:
        torch.device(hardware.device_type)
    except RuntimeError:  # a stand-in that torch does not know keeps its tensors elsewhere
        pass
    else:
        found = runtime.device.type
        assert found == hardware.device_type, f"tensors live on '{found}', device_type is '{hardware.device_type}'"
    for index in (-1, runtime.device_count()):
        _refused(lambda index=index: runtime.select(index), "device_index")  # type: ignore[misc]
    assert isinstance(runtime.collective_backend, str)
    assert runtime.profiler_activities()
    memory = runtime.memory()
    assert 0 <= memory.free <= memory.total > 0 <= memory.peak, f"memory numbers do not fit together: {memory}"


def check_copies(hardware: HardwareBackend) -> None:
    """Every dtype and shape, views too, goes to the device and back as it was; an asynchronous copy is a copy."""
    runtime = hardware.runtime
    runtime.empty_cache()
    for dtype in COPIED:
        whole = torch.arange(60).remainder(2 if dtype == torch.bool else 60).to(dtype).reshape(3, 4, 5)
        for tensor in (whole, whole[:, 1:3], whole.transpose(0, 2), whole[:0], whole[1, 2, 3]):
            with runtime.range("copies"):
                there = runtime.to_device(tensor)
            assert there.device.type == runtime.device.type, f"a {dtype} tensor went to {there.device}"
            _same(runtime.to_host(there), tensor, f"a {dtype} tensor of shape {list(tensor.shape)}, there and back")
            _same(runtime.to_host(runtime.to_device(runtime.pin(tensor))), tensor, f"a pinned {dtype} tensor")
            copy, event = runtime.to_host_async(there)
            event.synchronize()
            assert event.query(), "the copy's event is not passed after it was waited for"
            kept = tensor.clone()
            there.zero_()
            runtime.synchronize()
            _same(copy, kept, f"an asynchronous copy of a {dtype} tensor, after its source changed")
            tensor.copy_(kept)  # where a copy to the device is the tensor itself


def check_order(hardware: HardwareBackend) -> None:
    """A stream that waits for an event, or for a stream, sees what was done before; time passes between events."""
    runtime = hardware.runtime
    rows = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) / 16
    expected = _chain(rows) + 1
    there, side = runtime.to_device(rows), runtime.stream()
    begin, end = runtime.event(timing=True), runtime.event(timing=True)
    side.wait_stream(runtime.current_stream())
    with runtime.use_stream(side):
        begin.record(runtime.current_stream())
        result = _chain(there)
        end.record(runtime.current_stream())
    runtime.current_stream().wait_event(end)
    _near(runtime.to_host(result + 1), expected, "work after an event of another stream")
    end.synchronize()
    assert end.query(), "an event is not passed after it was waited for"
    assert begin.elapsed_time(end) > 0, "no time passed between two events with work between them"
    with runtime.use_stream(side):
        result = _chain(there)
    runtime.current_stream().wait_stream(side)
    _near(runtime.to_host(result + 1), expected, "work after another stream")
    side.synchronize()
    runtime.synchronize()


def check_random(hardware: HardwareBackend) -> None:
    """A seed repeats all draws of host and device, and a saved state repeats those that followed it."""
    runtime = hardware.runtime

    def draws() -> list[Tensor]:
        return [torch.rand(5), *(runtime.to_host(torch.rand(5, device=runtime.device)) for _ in range(2))]

    runtime.seed(11)
    first, state, second = draws(), runtime.rng_state(), draws()
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "draws repeat without being asked to"
    runtime.set_rng_state(state)
    for found, expected in zip(draws(), second, strict=True):
        _same(found, expected, "a draw after its saved state was restored")
    runtime.seed(11)
    for found, expected in zip(draws(), first, strict=True):
        _same(found, expected, "a draw after the same seed")


def check_dtypes(hardware: HardwareBackend) -> None:
    """Claimed dtypes can be computed in; autocast computes in the dtype it is given, and None keeps every tensor's own."""
    runtime = hardware.runtime
    rows = torch.eye(8) * 3
    for dtype in hardware.capabilities.dtypes:
        there = runtime.to_device(rows.to(dtype))
        _same(runtime.to_host(there @ there), rows.to(dtype) * 3, f"a product in {dtype}")
    there = runtime.to_device(rows)
    with runtime.autocast(None):
        assert (there @ there).dtype == torch.float32
    if torch.bfloat16 in hardware.capabilities.dtypes:
        with runtime.autocast(torch.bfloat16):
            assert (there @ there).dtype == torch.bfloat16, "a product under autocast keeps fp32"
    if hardware.capabilities.fp8:
        eighths = runtime.to_device(rows).to(torch.float8_e4m3fn)
        _same(runtime.to_host(eighths.float()), rows, "values that e4m3 can hold")


def check_replay(hardware: HardwareBackend) -> None:
    """A replay reads what its buffers hold then, whichever graph of a pool is replayed, before and after `update`."""
    runtime = hardware.runtime
    buffer = runtime.to_device(torch.arange(6.0))
    pool = hardware.graph.new_pool()
    with torch.no_grad():
        graphs = {factor: hardware.graph.capture(lambda f=factor: buffer * f + 1, pool) for factor in (2.0, 3.0)}  # type: ignore[misc]
        for round_number, values in enumerate((torch.arange(6.0), torch.ones(6), torch.arange(6.0) - 9)):
            buffer.copy_(values)
            for factor, graph in graphs.items():
                graph.update({"lengths": torch.tensor([round_number + 1]), "nobody's": torch.zeros(1)})
                _same(runtime.to_host(graph.replay()), values * factor + 1, f"replay {round_number + 1} on new values")
    for graph in graphs.values():
        graph.close()


def check_random_replay(hardware: HardwareBackend) -> None:
    """Draws inside a graph advance the device's generator as eager calls do: the same seed, the same values, each time new."""
    runtime = hardware.runtime

    def draw() -> Tensor:
        return torch.rand(7, device=runtime.device) + 1

    graph = hardware.graph.capture(draw)
    runtime.seed(5)
    expected = [runtime.to_host(draw()).clone() for _ in range(3)]
    runtime.seed(5)
    for number, values in enumerate(expected):
        _same(runtime.to_host(graph.replay()), values, f"draw {number + 1} of a captured graph, against an eager one")
    graph.close()


def check_budget(hardware: HardwareBackend) -> None:
    """A graph takes one place of the budget and gives it back when it is closed; past the budget a capture is refused."""
    graph, buffer = hardware.graph, hardware.runtime.to_device(torch.ones(3))
    before = graph.budget()
    captured = graph.capture(lambda: buffer + 1)
    if before is None:
        assert graph.budget() is None, "a budget appeared with the first graph"
        captured.close()
        return
    assert graph.budget() == before - 1, f"one graph took the budget from {before} to {graph.budget()}"
    captured.close()
    assert graph.budget() == before, f"closing a graph left the budget at {graph.budget()}, not {before}"
    if before <= _FEW_GRAPHS:
        held = [graph.capture(lambda: buffer + 1) for _ in range(before)]
        _refused(lambda: graph.capture(lambda: buffer + 1), "graph_budget_exhausted")
        for captured in held:
            captured.close()
        assert graph.budget() == before


def check_failed_capture(hardware: HardwareBackend) -> None:
    """Where graphs record, a function that reads a value on the host is refused with its cause, and work goes on after it."""
    if not hardware.capabilities.captures:
        return
    runtime, buffer = hardware.runtime, hardware.runtime.to_device(torch.arange(4.0))

    def reads_on_the_host() -> Tensor:
        return buffer * buffer.sum().item()

    with torch.no_grad():
        error = _refused(lambda: hardware.graph.capture(reads_on_the_host), "graph_capture_failed")
        assert error.__cause__ is not None, "the error does not keep its cause"
        assert "reads_on_the_host" in str(error), f"the error does not name the function: {error}"
        _same(runtime.to_host(buffer + 1), torch.arange(4.0) + 1, "eager work after a failed capture")
        after = hardware.graph.capture(lambda: buffer * 2)
        _same(runtime.to_host(after.replay()), torch.arange(4.0) * 2, "a graph captured after a failed one")
    after.close()


def check_engine(hardware: HardwareBackend) -> None:
    """A small model's recommendations are those of the CPU platform, but where rounding decides between equals."""
    plain = build_hardware_backend(HardwareConfig(hardware_platform="cpu"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_tiny_model(Path(temporary) / "model", num_items=60, codebook_sizes=(8, 8, 8))
        found, expected = (_recommend(folder, backend) for backend in (hardware, plain))
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs), f"{len(ours)} items came back, not {len(theirs)}"
        for mine, other in ((ours, theirs), (theirs, ours)):
            worst = min(other.values())
            for item, score in mine.items():
                gap = abs(other.get(item, worst) - score)
                assert gap < 1e-3, f"'{item}' scores {score:.4f} here, {other.get(item)} there"


PLATFORM_CHECKS: tuple[Callable[[HardwareBackend], None], ...] = (
    check_identity,
    check_copies,
    check_order,
    check_random,
    check_dtypes,
    check_replay,
    check_random_replay,
    check_budget,
    check_failed_capture,
    check_engine,
)


def _recommend(folder: Path, backend: HardwareBackend) -> list[Mapping[str, float]]:
    """Item -> score, for histories of several lengths."""
    recommender = Recommender.from_pretrained(folder, backend=backend)
    answers = [recommender.recommend([f"item-{row}" for row in range(length)], n=15) for length in (1, 4, 12)]
    return [{item.item_id: item.score for item in answer.items} for answer in answers]


def _chain(rows: Tensor) -> Tensor:
    """Enough work that whoever does not wait for it comes too early."""
    result = rows
    for _ in range(20):
        result = torch.tanh(result @ rows)
    return result


def _refused(call: Callable[[], object], code: str) -> HardwareError:
    """The HardwareError of that code which the call must raise."""
    try:
        call()
    except HardwareError as error:
        assert error.code == code, f"refused with '{error.code}', not '{code}': {error}"
        return error
    raise AssertionError(f"not refused; '{code}' was expected")


def _same(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.dtype == expected.dtype, f"{what} has dtype {found.dtype}, not {expected.dtype}"
    assert torch.equal(found, expected), f"{what} is {found.tolist()}, not {expected.tolist()}"


def _near(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, msg=lambda text: f"{what}: {text}")
