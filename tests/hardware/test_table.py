"""The op table: where each field comes from, what is refused, what falls back, and what is counted."""

from __future__ import annotations

import dataclasses
import logging
import pickle

import pytest
import torch

from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.cpu import CpuBackend
from polyrec.hardware.ops import REFERENCE_OPS, partial_ops
from polyrec.hardware.ops.norm import NormOps, add_rms_norm, rms_norm
from polyrec.hardware.ops.spec import MISSING, Missing, group_specs, op_claims, partial_group
from polyrec.hardware.plugin.source import PluginSource
from polyrec.hardware.table import Replacement, all_specs, fuses, implementation_name, is_replaced, resolve

SOURCE = PluginSource("fast", "fast-dist", "1.2.3")


class Elsewhere(CpuBackend):
    """A platform of another package than its operations."""

    platform_name = "elsewhere"


@op_claims(train=False)
def infer_only_norm(x, weight, eps):
    with torch.no_grad():
        return rms_norm(x, weight, eps)


def own_norm(x, weight, eps):
    return rms_norm(x, weight, eps)


def with_norm(**fields):
    """The reference, with fields of the norm group changed."""
    return dataclasses.replace(REFERENCE_OPS, norm=dataclasses.replace(REFERENCE_OPS.norm, **fields))


def table(ops=REFERENCE_OPS, replacements=None, fallback="warn", purpose="infer"):
    return resolve(Elsewhere, ops, replacements or {}, fallback, purpose)


def refused(code, **settings):
    with pytest.raises(HardwareError) as caught:
        table(**settings)
    assert caught.value.code == code
    assert caught.value.remedy
    return caught.value.message


def test_all_missing_operations_are_in_one_message():
    message = refused("op_missing", ops=partial_ops())
    required = {field for field, spec in all_specs().items() if spec.tier == "R" and "infer" in spec.modes}
    assert len(required) > 5
    assert {field for field in all_specs() if f"{field} (required)" in message} == required
    assert "'elsewhere'" in message


def test_what_only_training_needs_is_missing_only_there():
    training = {field for field, spec in all_specs().items() if spec.tier == "R" and spec.modes == ("train",)}
    assert training, "else this shows nothing"
    for field in training:
        group, _, name = field.partition(".")
        lacking = dataclasses.replace(
            REFERENCE_OPS, **{group: dataclasses.replace(getattr(REFERENCE_OPS, group), **{name: MISSING})}
        )
        assert table(lacking).row(field).origin == "absent"
        assert field in refused("op_missing", ops=lacking, purpose="train")


def test_strict_refuses_every_fallback_and_names_them():
    ops = with_norm(add_rms_norm=MISSING, layer_norm=MISSING)
    message = refused("op_missing", ops=ops, fallback="strict")
    assert "norm.add_rms_norm (would fall back" in message
    assert "norm.layer_norm (would fall back" in message
    assert "norm.rms_norm" not in message.replace("add_rms_norm", "")


def test_strict_also_names_what_would_fall_back_once_the_required_operations_are_there():
    ops = with_norm(rms_norm=MISSING, add_rms_norm=MISSING)
    message = refused("op_missing", ops=ops, fallback="strict")
    assert "norm.rms_norm (required)" in message
    assert "norm.add_rms_norm (would fall back" in message
    assert "norm.add_rms_norm" not in refused("op_missing", ops=ops)


def test_a_fallback_is_reported_once_and_counted(caplog):
    found = table(with_norm(add_rms_norm=MISSING))
    row = found.row("norm.add_rms_norm")
    assert (row.origin, row.source, row.fallback) == ("decomposed", "norm.rms_norm", True)
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    assert "op_fallback" not in caplog.text, "nothing was called yet"
    for _ in range(3):
        result = found.ops.norm.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(result, add_rms_norm(x, residual, weight, 1e-6))
    assert found.fallback_calls()["norm.add_rms_norm"] == 3
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("[op_fallback] Platform 'elsewhere' has no 'norm.add_rms_norm'")


def test_a_fusion_of_torchs_own_calls_falls_back_to_its_reference(caplog):
    ops = dataclasses.replace(REFERENCE_OPS, rope=dataclasses.replace(REFERENCE_OPS.rope, angles=MISSING))
    found = table(ops)
    row = found.row("rope.angles")
    assert (row.origin, row.source, row.fallback) == ("decomposed", "reference", True)
    given = torch.arange(5), torch.rand(4)
    torch.testing.assert_close(found.ops.rope.angles(*given), REFERENCE_OPS.rope.angles(*given), rtol=0, atol=0)
    assert found.fallback_calls()["rope.angles"] == 1
    assert "has no 'rope.angles': it runs as reference" in caplog.text
    assert "rope.angles (would fall back" in refused("op_missing", ops=ops, fallback="strict")


def test_an_allowed_fallback_is_silent_and_counted_all_the_same(caplog):
    found = table(with_norm(add_rms_norm=MISSING), fallback="allow")
    found.ops.norm.add_rms_norm(torch.randn(3, 8), torch.randn(3, 8), torch.rand(8), 1e-6)
    assert found.fallback_calls()["norm.add_rms_norm"] == 1
    assert caplog.text == ""


def test_a_decomposition_uses_the_plugins_part_and_counts_it():
    found = table(with_norm(add_rms_norm=MISSING), {"norm.rms_norm": Replacement(own_norm, SOURCE)})
    found.ops.norm.add_rms_norm(torch.randn(3, 8), torch.randn(3, 8), torch.rand(8), 1e-6)
    assert {field: calls.count for field, calls in found.calls.items()} == {"norm.rms_norm": 1, "norm.add_rms_norm": 1}


@pytest.mark.parametrize(
    ("own", "plugins", "expected"),
    [
        (True, (), True),
        (False, (), False),  # the reference
        (MISSING, (), False),
        (True, ("norm.rms_norm",), False),
        (True, ("norm.layer_norm",), True),
        (True, ("norm.add_rms_norm",), True),
        (MISSING, ("norm.add_rms_norm",), True),
        (True, ("norm.add_rms_norm", "norm.rms_norm"), True),
    ],
)
def test_who_fuses(own, plugins, expected):
    """No operation of a plugin is passed over by a platform's that contains it."""

    def fused(x, residual, weight, eps):
        return add_rms_norm(x, residual, weight, eps)

    ops = with_norm(add_rms_norm=MISSING if own is MISSING else fused if own else add_rms_norm)
    given = {field: Replacement(getattr(REFERENCE_OPS.norm, field.partition(".")[2]), SOURCE) for field in plugins}
    assert fuses(table(ops, given), "norm.add_rms_norm") is expected


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [
        ((), False),
        (("norm.rms_norm",), True),
        (("norm.add_rms_norm",), True),
        (("norm.layer_norm",), False),
    ],
)
def test_what_a_plugin_replaces(plugins, expected):
    given = {field: Replacement(getattr(REFERENCE_OPS.norm, field.partition(".")[2]), SOURCE) for field in plugins}
    assert is_replaced(table(REFERENCE_OPS, given), "norm.add_rms_norm") is expected


def test_a_decomposition_whose_parts_are_missing_is_absent_and_refuses_when_called():
    ops = dataclasses.replace(
        with_norm(rms_norm_fp8=MISSING),
        linear=dataclasses.replace(REFERENCE_OPS.linear, quantize_fp8=MISSING),
    )
    found = table(ops)
    assert found.row("norm.rms_norm_fp8").origin == "absent"
    assert isinstance(found.ops.norm.rms_norm_fp8, Missing)
    with pytest.raises(HardwareError, match=r"no operation 'norm\.rms_norm_fp8'") as caught:
        found.ops.norm.rms_norm_fp8(torch.ones(1, 4), torch.ones(4), 1e-6)
    assert caught.value.code == "op_not_available"


def test_a_plugin_fills_what_the_platform_lacks():
    ops = with_norm(rms_norm=MISSING)
    assert "norm.rms_norm (required)" in refused("op_missing", ops=ops)
    row = table(ops, {"norm.rms_norm": Replacement(own_norm, SOURCE)}).row("norm.rms_norm")
    assert (row.origin, row.source, row.fallback) == ("plugin", "fast (fast-dist 1.2.3)", False)


def test_an_operation_without_gradient_is_refused_from_a_plugin_and_replaced_in_a_platform(caplog):
    message = refused(
        "op_infer_only", replacements={"norm.rms_norm": Replacement(infer_only_norm, SOURCE)}, purpose="train"
    )
    assert "norm.rms_norm of fast (fast-dist 1.2.3)" in message
    found = table(with_norm(rms_norm=infer_only_norm), purpose="train")
    assert found.row("norm.rms_norm").fallback
    x = torch.randn(3, 8, requires_grad=True)
    assert found.ops.norm.rms_norm(x, torch.rand(8), 1e-6).requires_grad
    assert "has no 'norm.rms_norm' with a gradient" in caplog.text
    assert table(with_norm(rms_norm=infer_only_norm)).row("norm.rms_norm").fallback is False


@pytest.mark.parametrize(
    ("function", "origin", "source"),
    [
        (rms_norm, "reference", ""),
        (own_norm, "built-in", ""),
        (torch.nn.functional.rms_norm, "inherited", "torch.nn.functional"),
    ],
)
def test_origins(function, origin, source):
    row = table(with_norm(rms_norm=function)).row("norm.rms_norm")
    assert (row.origin, row.source) == (origin, source)


def test_what_a_variant_takes_from_another_platforms_folder_is_inherited():
    from polyrec.hardware.backends.cuda_like import CUDA_LIKE_SEARCH_OPS, NvidiaBackend
    from polyrec.hardware.backends.cuda_like.variants import MetaxBackend

    ops = dataclasses.replace(REFERENCE_OPS, search=CUDA_LIKE_SEARCH_OPS)
    origins = [
        resolve(cls, ops, {}, "warn", "infer").row("search.beam_step")
        for cls in (NvidiaBackend, MetaxBackend, CpuBackend)
    ]
    assert [(row.origin, row.source) for row in origins[1:]] == [("inherited", "cuda_like")] * 2
    assert origins[0].implementation == origins[1].implementation


def test_claims_are_in_the_row_and_ask_before_a_model_is_built():
    claimed = op_claims(dtypes=(torch.bfloat16,), graph_safe=False)(lambda x, weight, eps: x)
    found = table(with_norm(rms_norm=claimed))
    row = found.row("norm.rms_norm")
    assert (row.dtypes, row.train, row.graph_safe) == (("bfloat16",), True, False)
    assert [row.field for row in found.unsupported(torch.float32)] == ["norm.rms_norm"]
    assert found.unsupported(torch.bfloat16) == []


def test_the_fingerprint_follows_implementations_and_versions():
    newer = PluginSource("fast", "fast-dist", "1.2.4")
    tables = [
        table(),
        table(with_norm(rms_norm=own_norm)),
        table(replacements={"norm.rms_norm": Replacement(own_norm, SOURCE)}),
        table(replacements={"norm.rms_norm": Replacement(own_norm, newer)}),
    ]
    assert len({found.fingerprint for found in tables}) == len(tables)
    assert table().fingerprint == tables[0].fingerprint


def test_no_field_is_lost():
    found = table()
    assert [row.field for row in found.rows] == list(all_specs())
    assert all(len(group_specs(type(group))) == len(dataclasses.fields(group)) for group in vars(found.ops).values())
    assert found.calls == {}, "neither fallbacks nor plugins: nothing stands between the layers and their operations"
    assert found.ops == REFERENCE_OPS


def test_rows_survive_a_process_boundary():
    rows = table(with_norm(add_rms_norm=MISSING)).rows
    assert pickle.loads(pickle.dumps(rows)) == rows


class Callable_:
    def __call__(self, x, weight, eps):
        return x


def test_implementations_are_named_whatever_they_are():
    from functools import partial

    assert implementation_name(rms_norm) == "polyrec.hardware.ops.norm:rms_norm"
    assert implementation_name(partial(rms_norm, eps=1)) == "polyrec.hardware.ops.norm:rms_norm"
    assert implementation_name(Callable_()) == f"{__name__}:Callable_"


def test_partial_groups_hold_what_they_were_given():
    group = partial_group(NormOps, rms_norm=own_norm)
    assert group.rms_norm is own_norm
    assert isinstance(group.layer_norm, Missing)
