"""Ascend's operations keep their specifications, with a stand-in for torch_npu that is as strict as its documentation."""

from __future__ import annotations

import pytest
import torch

from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.ascend import AscendBackend, AscendGraph, AscendRuntime
from polyrec.hardware.backends.ascend.ops import ascend_ops
from polyrec.hardware.ops.check import CheckRaised, check_op
from polyrec.hardware.ops.spec import MISSING, Missing, claims_of
from polyrec.hardware.table import all_specs, resolve

from .standin import Library

FP8_FIELDS = {
    "norm.rms_norm_fp8",
    "norm.add_rms_norm_fp8",
    "norm.mm_add_rms_norm_fp8",
    "act.silu_and_mul_fp8",
    "linear.quantize_fp8",
    "linear.quantize_fp8_blocks",
    "linear.scaled_mm",
    "linear.block_scaled_mm",
}
KERNELS = {  # field -> the functions of torch_npu behind it
    "norm.rms_norm": {"npu_rms_norm"},
    "norm.add_rms_norm": {"npu_add_rms_norm"},
    "act.silu_and_mul": {"npu_swiglu"},
    "rope.rotary": {"npu_rotary_mul"},
    "rope.qk_norm_rotary": {"npu_rms_norm", "npu_rotary_mul"},
    "rope.rotary_store": {"npu_rotary_mul", "npu_scatter_pa_kv_cache"},
    "rope.qk_norm_rotary_store": {"npu_rms_norm", "npu_rotary_mul", "npu_scatter_pa_kv_cache"},
    "kv.write": {"npu_scatter_pa_kv_cache"},
    "linear.grouped_mm": {"npu_grouped_matmul"},
    "moe.experts": {"npu_grouped_matmul", "npu_swiglu"},
}
SPECS = all_specs()
PRESENT = sorted(SPECS.keys() - FP8_FIELDS)


@pytest.fixture
def library():
    return Library()


@pytest.fixture(autouse=True)
def _no_pinned_memory(monkeypatch):
    """This machine has no accelerator to pin memory for."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def function(library, field):
    group, _, name = field.partition(".")
    return getattr(getattr(ascend_ops(library), group), name)


def faults(library, field, implementation=None, **changes):
    options = {"dtypes": (torch.float32, torch.bfloat16, torch.float16), "train": True, "level": "full", **changes}
    return check_op(
        field,
        SPECS[field],
        implementation or function(library, field),
        runtime=AscendRuntime(library, "cpu"),
        graph=AscendGraph(library),
        **options,
    )


@pytest.mark.parametrize("field", PRESENT)
def test_every_operation_keeps_its_specification(library, field):
    assert faults(library, field) == []
    assert KERNELS.get(field, set()) == {name for name in library.names() if "npu_" in name}


@pytest.mark.parametrize("field", sorted(KERNELS))
def test_kernels_are_captured_where_the_specification_asks_for_it(library, field):
    faults(library, field, dtypes=(torch.bfloat16,), train=False)
    assert "NPUGraph.replay" in library.names()


@pytest.mark.parametrize("field", sorted(FP8_FIELDS))
def test_fp8_is_refused(library, field):
    with pytest.raises(HardwareError) as caught:
        function(library, field)()
    assert caught.value.code == "op_not_available"


@pytest.mark.parametrize("purpose", ["infer", "train"])
def test_nothing_else_is_missing(library, purpose):
    table = resolve(AscendBackend, ascend_ops(library), {}, "warn", purpose)
    assert {row.field for row in table.rows if row.origin == "absent"} == FP8_FIELDS
    # torch_npu has no gradient for these three, so training falls back and says so.
    without_gradient = {"norm.add_rms_norm", "linear.grouped_mm", "moe.experts"}
    assert {row.field for row in table.rows if row.fallback} == (without_gradient if purpose == "train" else set())


def test_inference_starts_even_without_permission_to_fall_back(library):
    resolve(AscendBackend, ascend_ops(library), {}, "strict", "infer")


def test_what_claims_no_gradient_has_none(library):
    """The claim is no more than the truth: without it the check would object."""
    for field in ("norm.add_rms_norm", "linear.grouped_mm"):
        own = function(library, field)
        assert claims_of(own).train is False
        found = faults(library, field, lambda *args, own=own: own(*args), dtypes=(torch.float32,), level="quick")
        assert {fault.kind for fault in found} == {"gradient"}


def test_weights_that_are_wider_than_activations_are_normed_by_torch(library):
    """As under autocast, where parameters stay fp32: torch_npu takes one dtype only."""
    x, weight = torch.randn(3, 8).bfloat16(), torch.rand(8)
    found = function(library, "norm.rms_norm")(x, weight, 1e-6)
    wide = x.double()
    torch.testing.assert_close(
        found.double(), wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight, atol=2e-2, rtol=2e-2
    )
    assert found.dtype == torch.float32
    normed, total = function(library, "norm.add_rms_norm")(x, x.float(), weight, 1e-6)
    assert normed.dtype == total.dtype == torch.float32
    assert library.names() == []


def test_a_single_row_is_normed(library):
    x, weight = torch.randn(16), torch.rand(16)
    found = function(library, "norm.rms_norm")(x, weight, 1e-6)
    assert found.shape == (16,)
    torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, (16,), weight, 1e-6))


def test_a_cache_with_gaps_is_written_by_torch(library):
    caches = torch.zeros(6, 2, 2, 16)  # keys and values of a slot side by side
    key, value, slots = torch.randn(2, 2, 16), torch.randn(2, 2, 16), torch.tensor([4, 1])
    function(library, "kv.write")(key, value, caches[:, 0], caches[:, 1], slots)
    assert library.names() == []
    assert torch.equal(caches[slots, 0], key)
    assert torch.equal(caches[slots, 1], value)


@pytest.mark.parametrize(("groups", "rows"), [(1, 5), (3, 0)])
def test_shapes_that_the_grouped_kernel_refuses_go_to_torch(library, groups, rows):
    x, weight = torch.randn(rows, 8), torch.randn(groups, 4, 8)
    sizes = torch.tensor([rows, *[0] * (groups - 1)])
    found = function(library, "linear.grouped_mm")(x, weight, sizes)
    assert library.names() == []
    torch.testing.assert_close(found, x @ weight[0].T)


@pytest.mark.parametrize(
    ("field", "break_it", "words"),
    [
        ("norm.rms_norm", {"npu_rms_norm": lambda x, w, epsilon: (x * w, None)}, "value"),
        ("rope.rotary", {"npu_rotary_mul": lambda x, r1, r2, rotary_mode: x * r1}, "value"),
        ("norm.add_rms_norm", {"npu_add_rms_norm": lambda x, y, w, epsilon: (x, None, y)}, "value"),
    ],
)
def test_a_kernel_that_computes_something_else_is_found(library, field, break_it, words):
    for name, kernel in break_it.items():
        setattr(library, name, kernel)
    assert words in {fault.kind for fault in faults(library, field, train=False)}


def test_the_stand_in_refuses_what_the_documentation_refuses(library):
    x = torch.randn(4, 8)
    for call, words in (
        (lambda: library.npu_rms_norm(x, x[0].bfloat16()), "gamma"),
        (lambda: library.npu_rms_norm(x, x[0], eps=1e-6), "eps"),
        (lambda: library.npu_rotary_mul(x[None, :, None], x[None, :, None, :4], x[None, :, None, :4]), "r1"),
        (lambda: library.npu_swiglu(x[:, :3], dim=-1), "3"),
        (
            lambda: library.npu_scatter_pa_kv_cache(
                x.view(4, 2, 4), x.view(4, 2, 4), x.view(1, 4, 2, 4), x.view(1, 4, 2, 4), torch.arange(4)
            ),
            "tiles",
        ),
    ):
        with pytest.raises((RuntimeError, TypeError), match=words):
            call()


def test_an_exception_of_a_kernel_is_kept(library):
    library.npu_swiglu = lambda x, dim: 1 / 0
    with pytest.raises(CheckRaised) as caught:
        faults(library, "act.silu_and_mul")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_missing_fields_are_the_layers_own_marker(library):
    assert isinstance(ascend_ops(library).linear.scaled_mm, Missing)
    assert ascend_ops(library).linear.scaled_mm is MISSING
