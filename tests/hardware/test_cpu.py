"""The CPU's runtime and graph keep the contracts of `hardware.base`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from polyrec.hardware.backends.cpu import CpuBackend
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
    assert state.dtype == torch.uint8
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
