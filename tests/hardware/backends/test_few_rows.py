"""Which products go to the kernel for few rows and with which tiles, from shapes alone; the kernel's own tests are in
`kernel_bodies.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from polyrec.hardware.backends.cuda_like import CUDA_LIKE_OPS, cuda_like_ops
from polyrec.hardware.backends.cuda_like.ops import few_rows, linear
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.hardware.ops.spec import FP8

QKV, OUT, GATE_UP, DOWN = (4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)  # outputs, inputs of the 1.7B model
OTHERS = [(16, 16), (208, 200), (3072, 1024), (1024, 3072), (2560, 9728), (4096, 12288), (57344, 8192), (64, 2176)]
ROWS = (1, 16, 50, 64, 65, 100, 128, 256, 512)
SHARED_MEMORY = 227 * 1024  # of a Hopper multiprocessor


@pytest.mark.parametrize(
    ("rows", "taken"),
    [
        (1, {QKV, OUT, GATE_UP, DOWN}),
        (50, {QKV, OUT, GATE_UP, DOWN}),
        (64, {QKV, OUT, GATE_UP, DOWN}),
        (65, {OUT, DOWN}),
        (128, {OUT, DOWN}),
        (129, set()),
        (4000, set()),
    ],
)
def test_products_that_leave_torch_few_programs_are_taken(monkeypatch, rows, taken):
    monkeypatch.setattr(few_rows, "ENABLED", True)
    assert {shape for shape in (QKV, OUT, GATE_UP, DOWN) if few_rows.takes(rows, shape[0])} == taken


def test_none_is_taken_with_the_kernel_off(monkeypatch):
    monkeypatch.setattr(few_rows, "ENABLED", False)
    assert not few_rows.takes(1, 2048)


@pytest.mark.parametrize(
    ("inputs", "splits"),
    [(128, 1), (2048, 1), (3072, 2), (4096, 2), (6144, 4), (12288, 8), (9728, 4), (6145, 1), (2176, 1)],
)
def test_inputs_are_cut_into_parts_of_whole_steps(inputs, splits):
    assert few_rows.splits_of(inputs) == splits
    assert splits == 1 or inputs % (splits * few_rows.SHALLOW) == 0


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), [QKV, OUT, GATE_UP, DOWN, *OTHERS])
def test_tiles_cover_the_product_and_fit_a_multiprocessor(rows, outputs, inputs):
    found = few_rows.tiling(rows, outputs, inputs)
    assert (found.rows, found.columns) in few_rows.TILES
    assert found.splits == few_rows.splits_of(inputs)  # in every batch the same
    assert found.splits == 1 or inputs % (found.splits * found.depth) == 0
    assert found.stages >= 3
    assert found.stages * (found.rows + found.columns) * found.depth <= SHARED_MEMORY / 2  # two programs at a time
    assert found.warps % 4 == 0
    assert 16 * found.warps <= found.rows  # each warp of the matrix units has 16 rows
    tiles = -(-rows // found.rows), -(-outputs // found.columns)
    assert found.programs(rows, outputs) == tiles[0] * tiles[1] * found.splits


@pytest.mark.parametrize("rows", [16, 50, 64, 100, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [QKV, OUT, GATE_UP, DOWN])
def test_the_programs_of_the_model_run_at_once_on_most_of_the_device(rows, outputs, inputs):
    assert 96 <= few_rows.tiling(rows, outputs, inputs).programs(rows, outputs) <= few_rows.PROCESSORS


def test_among_tiles_that_run_at_once_the_one_that_reads_least_is_chosen():
    assert few_rows.tiling(50, *OUT)[:2] == (64, 16)
    assert few_rows.tiling(50, *QKV)[:2] == (64, 32)
    assert few_rows.tiling(100, *DOWN)[:3] == (128, 64, 4)
    assert few_rows.tiling(512, *GATE_UP)[:2] == (128, 128)  # none runs at once


@pytest.fixture
def launched(monkeypatch):
    """The launches of a kernel that a device would run."""
    calls = []
    monkeypatch.setattr(few_rows, "ENABLED", True)
    monkeypatch.setattr(linear, "runs_kernel", lambda *tensors: True)
    monkeypatch.setattr(linear, "is_tuned", lambda device: True)
    module = SimpleNamespace(few_rows_scaled_mm=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(linear, "kernels", {"few_rows_mm": module}.__getitem__)
    return calls


def arguments(rows, outputs, inputs):
    q, weight = torch.ones(rows, inputs).to(FP8), torch.ones(outputs, inputs).to(FP8)
    return q, torch.ones(rows, 1), weight, torch.ones(outputs, 1), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "splits"), [(256, 1), (4096, 2)])
def test_few_rows_are_launched_with_room_for_the_parts(launched, inputs, splits, dtype):
    found = cuda_like_ops(triton=True, fp8=True).linear.scaled_mm(*arguments(3, 32, inputs), dtype)
    (*_, out, partial, tiling) = launched[0]
    assert out is found
    assert (found.shape, found.dtype) == ((3, 32), dtype)
    assert tiling == few_rows.tiling(3, 32, inputs)
    assert (partial is None) == (splits == 1)
    assert partial is None or (partial.shape, partial.dtype) == ((splits, 3, 32), torch.float32)


@pytest.mark.parametrize("change", ["many rows", "off", "another device", "host"])
def test_the_rest_is_torchs(monkeypatch, launched, change):
    if change == "off":
        monkeypatch.setattr(few_rows, "ENABLED", False)
    if change == "another device":
        monkeypatch.setattr(linear, "is_tuned", lambda device: False)
    if change == "host":
        monkeypatch.setattr(linear, "runs_kernel", lambda *tensors: False)
    case = arguments(200 if change == "many rows" else 3, 32, 64)
    found = cuda_like_ops(triton=True, fp8=True).linear.scaled_mm(*case, torch.float32)
    assert torch.equal(found, REFERENCE_OPS.linear.scaled_mm(*case, torch.float32))
    assert launched == []


def test_a_platform_without_e4m3_keeps_its_product():
    assert cuda_like_ops(triton=True, fp8=False).linear.scaled_mm is CUDA_LIKE_OPS.linear.scaled_mm
    assert not linear.is_tuned(torch.device("cpu"))
