"""The gradients' norm in one launch, against float64: for a device and for Triton's interpreter.

`test_optim.py` runs this file in a process of its own, since Triton decides at its import whether to interpret.
"""

from __future__ import annotations

import pytest
import torch
from conversions import INTERPRETED, backend_of_bodies, converted

from polyrec.hardware.backends.cuda_like.kernels import total_norm as kernel
from polyrec.hardware.backends.cuda_like.ops import launch, optim
from polyrec.hardware.ops.check import check_op
from polyrec.hardware.ops.optim import OptimOps
from polyrec.hardware.ops.optim import total_norm as reference
from polyrec.hardware.ops.spec import FLOATS, group_specs

EACH = kernel.BLOCK * kernel.ROUNDS
SIZES = [1, 7, 0, 2048, EACH - 1, EACH, EACH + 1, 2 * EACH + 13, *([] if INTERPRETED else [50_000_001])]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Lets the kernels run on the host where Triton interprets them. Memory that nothing has written holds NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(float("nan")))
    if INTERPRETED:
        import triton.runtime.interpreter

        monkeypatch.setattr(triton.runtime.interpreter, "_convert_float", converted)
        monkeypatch.setattr(launch, "on_accelerator", lambda x: True)


@pytest.fixture(scope="module")
def backend():
    return backend_of_bodies()


@pytest.fixture
def launches(monkeypatch):
    """The dtypes and alignments of all launches."""
    seen, squares = [], kernel.squares

    def recorded(addresses, table, dtype, out, *, aligned):
        seen.append((dtype, aligned))
        squares(addresses, table, dtype, out, aligned=aligned)

    monkeypatch.setattr(kernel, "squares", recorded)
    return seen


def drawn(device, dtype, sizes=SIZES, seed=0):
    """Numbers of other orders in each tensor."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, generator=generator) * 10.0 ** -(place % 3)).to(dtype).to(device)
        for place, size in enumerate(sizes)
    ]


def close(found, tensors, relative=3e-7):
    exact = torch.stack([one.cpu().double().square().sum() for one in tensors]).sum().sqrt()
    assert (found.dtype, found.shape, found.device) == (torch.float32, (), tensors[0].device)
    assert abs(found.cpu().double() - exact) <= relative * exact


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_norm_of_many_tensors(backend, launches, dtype):
    tensors = drawn(backend.runtime.device, dtype)
    found = optim.total_norm(tensors)
    assert launches == [(dtype, True)], "one launch"
    close(found, tensors)
    assert torch.equal(found, optim.total_norm(tuple(tensors))), "the same bits"


def test_each_tensor_counts(backend):
    """A large one would hide what is left out of the small ones."""
    for place, size in enumerate(SIZES):
        tensors = [torch.zeros(each, dtype=torch.bfloat16, device=backend.runtime.device) for each in SIZES]
        if size:
            tensors[place][-1] = 3
            tensors[place][0] = 4 if size > 1 else 3
        assert optim.total_norm(tensors).item() == (0 if size == 0 else 3 if size == 1 else 5)


def test_tensors_that_move_and_change(backend):
    """Each step's gradients lie elsewhere; sizes that were met before keep their table."""
    device, kept = backend.runtime.device, []
    optim._chunk_table.cache_clear()
    for seed in range(3):
        tensors = drawn(device, torch.bfloat16, seed=seed)
        kept.append(tensors)
        close(optim.total_norm(tensors), tensors)
    assert optim._chunk_table.cache_info().misses == 1
    tensors = drawn(device, torch.bfloat16, [5, 3 * EACH])
    close(optim.total_norm(tensors), tensors)
    close(optim.total_norm(tensors[::-1]), tensors)


def test_tensors_of_other_layouts(backend, launches):
    """Views that begin between two loads, transposed ones, and others that are not in one piece."""
    wide = drawn(backend.runtime.device, torch.bfloat16, [EACH + 41])[0]
    square = drawn(backend.runtime.device, torch.bfloat16, [64 * 48])[0].view(64, 48)
    tensors = [wide[1:], square.t(), square[:, 1:], wide[8:], wide[3:].unsqueeze(0), wide[::2]]
    close(optim.total_norm(tensors), tensors)
    assert sorted(launches, key=str) == [(torch.bfloat16, False), (torch.bfloat16, True)]


def test_tensors_of_several_dtypes(backend, launches):
    device = backend.runtime.device
    tensors = [one for dtype in FLOATS for one in drawn(device, dtype)]
    close(optim.total_norm(tensors), tensors)
    assert launches == [(dtype, True) for dtype in FLOATS]


def test_what_is_left_to_torch(backend, launches):
    device = backend.runtime.device
    doubles = drawn(device, torch.float64)
    assert abs(optim.total_norm(doubles).item() - torch.cat(doubles).norm().item()) < 1e-9
    leaf = drawn(device, torch.float32, [40])[0].requires_grad_()
    close(optim.total_norm([leaf]).detach(), [leaf.detach()])
    assert launches == [(torch.float32, True)], "an optimizer's step asks for no gradient of the norm"


def test_nothing_and_empty_tensors(backend):
    device = backend.runtime.device
    assert optim.total_norm([]).item() == reference([]).item() == 0
    close(optim.total_norm(drawn(device, torch.bfloat16, [0, 0])), [torch.zeros(1, device=device)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen(backend, value):
    tensors = drawn(backend.runtime.device, torch.bfloat16)
    tensors[-1][-1] = value
    found = optim.total_norm(tensors).item()
    assert found == float("inf") if value == value else found != found


def test_the_layers_own_check(backend):
    dtypes = (torch.float32, torch.bfloat16) if INTERPRETED else backend.capabilities.dtypes
    faults = check_op(
        "optim.total_norm", group_specs(OptimOps)["total_norm"], optim.optim_ops().total_norm,
        runtime=backend.runtime, graph=backend.graph, dtypes=dtypes, train=True, level="full",
    )  # fmt: skip
    assert faults == [], "\n".join(map(str, faults))


@pytest.mark.skipif(INTERPRETED, reason="the host waits for nothing")
def test_the_host_waits_for_nothing(backend):
    """And the addresses of steps that are queued are not overwritten, whatever is pinned meanwhile. A first round compiles,
    and pins as much memory as the second one takes from what is kept."""
    tensors = [drawn(backend.runtime.device, torch.bfloat16, SIZES[:8], seed=seed) for seed in range(20)]
    for asleep in (False, True):
        backend.runtime.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(1_000_000_000)
            queued = []
            for some in tensors:
                queued.append(optim.total_norm(some))
                torch.zeros(len(some), dtype=torch.int64).pin_memory()
            assert not asleep or not torch.cuda.current_stream().query(), "the device has not come to them"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for found, some in zip(queued, tensors, strict=True):
        close(found, some)
