"""The groups as dataclasses: no defaults, a specification for every field, and what stands where nothing is implemented."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

from polyrec.core.errors import HardwareError
from polyrec.hardware.ops import REFERENCE_OPS, PlatformOps, op_groups, partial_ops
from polyrec.hardware.ops.spec import MISSING, Missing, group_specs, partial_group

FIELDS = [(group, name) for group, cls in op_groups().items() for name in group_specs(cls)]
WANTED = {
    "norm": "rms_norm add_rms_norm add_rms_norm_mm layer_norm rms_norm_fp8 add_rms_norm_fp8 mm_add_rms_norm_fp8",
    "act": "silu_and_mul gelu_and_mul silu_and_mul_mm silu_and_mul_fp8",
    "rope": "angles rotary qk_norm_rotary qkv_norm_rotary rotary_store qk_norm_rotary_store",
    "linear": "mm quantize_fp8 quantize_fp8_blocks scaled_mm block_scaled_mm grouped_mm",
    "kv": "write copy_pages locate",
    "search": "beam_step next_rows constrained_topk restricted_log_softmax",
    "sampling": "softmax top_k_mask top_p_mask gumbel_top_k penalize mask",
    "moe": "route permute experts",
    "loss": "linear_cross_entropy weighted_cross_entropy token_logp",
    "optim": "total_norm",
}


def test_groups_and_their_fields():
    assert {group: " ".join(group_specs(cls)) for group, cls in op_groups().items()} == WANTED
    assert [field.name for field in dataclasses.fields(PlatformOps)] == list(WANTED)


@pytest.mark.parametrize("cls", [PlatformOps, *op_groups().values()], ids=lambda cls: cls.__name__)
def test_no_field_has_a_default_and_nothing_can_be_set(cls):
    for field in dataclasses.fields(cls):
        assert field.default is field.default_factory is dataclasses.MISSING
    with pytest.raises(TypeError, match="required"):
        cls()
    assert cls.__dataclass_params__.frozen


@pytest.mark.parametrize(("group", "name"), FIELDS)
def test_a_fields_reference_is_the_function_of_its_name(group, name):
    function = getattr(getattr(REFERENCE_OPS, group), name)
    assert function is group_specs(op_groups()[group])[name].reference
    assert function.__name__ == name
    assert function.__doc__


@pytest.mark.parametrize(("group", "name"), FIELDS)
def test_a_specification_names_real_arguments_and_fields(group, name):
    spec = group_specs(op_groups()[group])[name]
    parameters = set(inspect.signature(spec.reference).parameters)
    assert {*spec.writes, *spec.views, *spec.strided, *spec.constants} <= parameters
    assert {tuple(need.split(".")) for need in spec.needs} <= set(FIELDS)
    if spec.decompose:
        made = spec.decompose(lambda field: lambda *args: None)
        ours, theirs = inspect.signature(made), inspect.signature(spec.reference)
        assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
            (p.name, p.kind, p.default) for p in theirs.parameters.values()
        ]


def test_what_is_missing_says_so_when_it_is_called():
    ops = partial_ops(
        norm=partial_group(op_groups()["norm"], rms_norm=REFERENCE_OPS.norm.rms_norm), act=REFERENCE_OPS.act
    )
    assert ops.norm.rms_norm is REFERENCE_OPS.norm.rms_norm
    assert ops.norm.layer_norm is MISSING
    assert ops.act is REFERENCE_OPS.act
    for group in WANTED.keys() - {"norm", "act"}:
        assert all(function is MISSING for function in vars(getattr(ops, group)).values())
    with pytest.raises(HardwareError) as caught:
        ops.moe.route(None, 1, True)
    assert caught.value.code == "op_not_available"
    with pytest.raises(HardwareError, match=r"moe\.route") as caught:
        Missing("moe.route")(None)
    assert caught.value.remedy


def test_unknown_groups_and_fields_are_our_mistake():
    with pytest.raises(AssertionError, match="nrom"):
        partial_ops(nrom=REFERENCE_OPS.norm)
    with pytest.raises(AssertionError, match="rms"):
        partial_group(op_groups()["norm"], rms=None)


def test_importing_the_groups_imports_nothing_heavy_beside_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import polyrec.hardware.ops;"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found == ["polyrec"]
