"""Which products go to the kernel for few rows and with which tiles, from shapes alone; the kernel's own tests are in
`kernel_bodies.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from polyrec.hardware.backends.cuda_like import CUDA_LIKE_OPS, cuda_like_ops
from polyrec.hardware.backends.cuda_like.ops import few_rows, linear, norm
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.hardware.ops.spec import FP8

QKV, OUT, GATE_UP, DOWN = (4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)  # outputs, inputs of the 1.7B model
MODEL = [QKV, OUT, GATE_UP, DOWN]
OTHERS = [(16, 16), (208, 200), (3072, 1024), (1024, 3072), (2560, 9728), (4096, 12288), (57344, 8192), (64, 2176)]
ROWS = (1, 16, 50, 64, 65, 100, 128, 129, 256, 512, 4000)
SHARED_MEMORY = 227 * 1024  # of a Hopper multiprocessor


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        (QKV, range(1, 257)),
        (OUT, range(1, 513)),
        (GATE_UP, [*range(1, 65), *range(129, 257)]),  # between them programs would be one and a half a multiprocessor
        (DOWN, range(1, 513)),
    ],
)
def test_the_model_s_products_are_taken_of_as_many_rows(shape, taken):
    assert [rows for rows in range(1, 4097) if few_rows.takes(rows, shape[0])] == [*taken]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), [*MODEL, *OTHERS])
def test_those_are_taken_whose_programs_run_at_once(rows, outputs, inputs):
    uncut = few_rows.tiling(rows, outputs, inputs)._replace(splits=1)
    if few_rows.takes(rows, outputs):
        at_once = SHARED_MEMORY // uncut.bytes_under_way
        assert uncut.programs(rows, outputs) <= few_rows.PROCESSORS * min(at_once, 3)
    else:
        assert uncut.columns == few_rows.COLUMNS[-1]
        assert uncut.programs(rows, outputs) > few_rows.PROCESSORS


@pytest.mark.parametrize(
    ("inputs", "splits"),
    [(128, 1), (2048, 1), (3072, 2), (4096, 2), (6144, 4), (12288, 8), (9728, 4), (6145, 1), (2176, 1)],
)
def test_inputs_are_cut_into_parts_of_whole_steps(inputs, splits):
    """Into as many for each number of rows up to 128, and not for more."""
    assert {few_rows.splits_of(rows, inputs) for rows in range(1, 129)} == {splits}
    assert {few_rows.splits_of(rows, inputs) for rows in (129, 256, 4000)} == {1}
    assert splits == 1 or inputs % (splits * few_rows.DEPTH) == 0


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), [*MODEL, *OTHERS])
def test_tiles_cover_the_product_and_fit_a_multiprocessor(rows, outputs, inputs):
    found = few_rows.tiling(rows, outputs, inputs)
    assert found.columns in few_rows.COLUMNS
    assert found.splits == few_rows.splits_of(rows, inputs)
    assert found.splits == 1 or inputs % (found.splits * found.depth) == 0
    assert found.bytes_under_way <= SHARED_MEMORY
    assert found.warps % 4 == 0
    assert 16 * found.warps <= found.rows  # each warp of the matrix units has 16 rows
    tiles = -(-rows // found.rows), -(-outputs // found.columns)
    assert found.programs(rows, outputs) == tiles[0] * tiles[1] * found.splits


@pytest.mark.parametrize("rows", [16, 50, 64, 100, 128, 256, 512])
@pytest.mark.parametrize(("outputs", "inputs"), MODEL)
def test_the_programs_of_the_model_run_at_once_on_most_of_the_device(rows, outputs, inputs):
    if few_rows.takes(rows, outputs):
        found = few_rows.tiling(rows, outputs, inputs)
        at_once = SHARED_MEMORY // found.bytes_under_way
        assert 96 <= found.programs(rows, outputs) <= few_rows.PROCESSORS * at_once


@pytest.mark.parametrize(
    ("rows", "shape", "tile"),
    [
        (50, QKV, (64, 32, 1)),
        (50, OUT, (64, 16, 1)),
        (50, GATE_UP, (64, 128, 1)),
        (50, DOWN, (64, 64, 4)),
        (100, QKV, (64, 64, 1)),
        (100, DOWN, (64, 128, 4)),
        (256, OUT, (64, 64, 1)),
        (256, DOWN, (64, 64, 1)),
        (512, DOWN, (64, 128, 1)),
        (512, GATE_UP, (64, 128, 1)),  # of none do all programs run at once
    ],
)
def test_among_tiles_that_run_at_once_the_one_that_reads_least_is_chosen(rows, shape, tile):
    assert few_rows.tiling(rows, *shape)[:3] == tile


@pytest.mark.parametrize(("rows", "stages"), [(50, 6), (100, 8), (129, 3), (256, 3), (257, 8)])
def test_programs_that_share_multiprocessors_have_fewer_loads_under_way(rows, stages):
    assert few_rows.tiling(rows, *GATE_UP).stages == stages


@pytest.fixture
def launched(monkeypatch):
    """The launches of a kernel that a device would run."""
    calls = []
    monkeypatch.setattr(linear, "runs_kernel", lambda *tensors: True)
    monkeypatch.setattr(linear, "is_tuned", lambda device: True)
    module = SimpleNamespace(
        few_rows_scaled_mm=lambda *arguments, exact: calls.append(("product", *arguments, exact)),
        few_rows_scaled_mm_sum=lambda *arguments: calls.append(("sum", *arguments)),
    )
    monkeypatch.setattr(linear, "kernels", {"few_rows_mm": module}.__getitem__)
    return calls


def arguments(rows, outputs, inputs):
    q, weight = torch.ones(rows, inputs).to(FP8), torch.ones(outputs, inputs).to(FP8)
    return q, torch.ones(rows, 1), weight, torch.ones(outputs, 1), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "splits"), [(3, 256, 1), (3, 4096, 2), (129, 4096, 1)])
def test_few_rows_are_launched_with_room_for_the_parts(launched, rows, inputs, splits, dtype):
    case = arguments(rows, 32, inputs)
    found = cuda_like_ops(triton=True, fp8=True).linear.scaled_mm(*case, dtype)
    (_, *given, out, tiling, exact), *sums = launched
    assert all(one is other for one, other in zip(given, case, strict=True))
    assert (found.shape, found.dtype) == ((rows, 32), dtype)
    assert tiling == few_rows.tiling(rows, 32, inputs)
    assert exact == (dtype != torch.bfloat16)
    if splits == 1:
        assert out is found
        assert sums == []
    else:
        assert (out.shape, out.dtype) == ((splits, rows, 32), torch.float32)
        assert [(name, partial is out, whole is found) for name, partial, *_, whole in sums] == [("sum", True, True)]


@pytest.mark.parametrize(("rows", "inputs", "splits"), [(3, 256, 1), (3, 4096, 2), (128, 4096, 2), (129, 4096, 1)])
def test_a_norm_takes_the_place_of_the_kernel_that_adds_up(monkeypatch, launched, rows, inputs, splits):
    """Two launches for the product and the norm, whether the inputs are cut or not."""
    module = SimpleNamespace(
        rms_norm=lambda *arguments: launched.append(("norm", *arguments)),
        rms_norm_of_parts=lambda *arguments: launched.append(("norm of parts", *arguments)),
    )
    monkeypatch.setattr(norm, "kernels", {"norm": module}.__getitem__)
    monkeypatch.setattr(norm, "runs_kernel", lambda *tensors: True)
    case, residual = arguments(rows, 32, inputs), torch.ones(rows, 32, dtype=torch.bfloat16)
    quantised, scale, total = norm.mm_add_rms_norm_fp8(*case, residual, residual[0], 1e-6)
    assert [name for name, *_ in launched] == ["product", "norm of parts" if splits > 1 else "norm"]
    assert launched[0][-3] is launched[1][1]
    assert launched[1][-3:] == (quantised, scale, total)
    assert (quantised.shape, quantised.dtype) == ((rows, 32), FP8)
    assert (scale.shape, scale.dtype) == ((rows, 1), torch.float32)
    assert (total.shape, total.dtype) == ((rows, 32), torch.bfloat16)


@pytest.mark.parametrize("change", ["many rows", "another device", "host"])
def test_the_rest_is_torchs(monkeypatch, launched, change):
    if change == "another device":
        monkeypatch.setattr(linear, "is_tuned", lambda device: False)
    if change == "host":
        monkeypatch.setattr(linear, "runs_kernel", lambda *tensors: False)
    many = few_rows.ROWS * few_rows.PROCESSORS + 1
    case = arguments(many if change == "many rows" else 3, 32, 64)
    found = cuda_like_ops(triton=True, fp8=True).linear.scaled_mm(*case, torch.float32)
    assert torch.equal(found, REFERENCE_OPS.linear.scaled_mm(*case, torch.float32))
    assert launched == []


def test_a_platform_without_e4m3_keeps_its_product():
    assert cuda_like_ops(triton=True, fp8=False).linear.scaled_mm is CUDA_LIKE_OPS.linear.scaled_mm
    assert not linear.is_tuned(torch.device("cpu"))
