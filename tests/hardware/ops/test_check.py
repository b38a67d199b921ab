"""The numeric check passes what is right, and finds each kind of fault in an implementation that is right otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_platform import ToyBackend

from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.cpu import CpuBackend
from polyrec.hardware.ops import op_groups
from polyrec.hardware.ops.check import CheckRaised, check_op
from polyrec.hardware.ops.compare import tensors
from polyrec.hardware.ops.draw import Draw
from polyrec.hardware.ops.spec import FLOATS, MISSING, Claims, claims_of, group_specs, op, op_claims

SPECS = {f"{group}.{name}": spec for group, cls in op_groups().items() for name, spec in group_specs(cls).items()}
CPU = CpuBackend()


def reference(field):
    return SPECS[field].reference


def check(field, function, *, dtypes=FLOATS, train=True, level="full", backend=CPU):
    return check_op(
        field,
        SPECS[field],
        function,
        runtime=backend.runtime,
        graph=backend.graph,
        dtypes=dtypes,
        train=train,
        level=level,
    )


def kinds(faults):
    return {fault.kind for fault in faults}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("field", SPECS)
def test_every_reference_passes_in_each_of_its_dtypes(field, dtype):
    if dtype not in SPECS[field].dtypes:
        assert kinds(check(field, reference(field), dtypes=(dtype,))) == {"no_dtype"}
        return
    assert check(field, reference(field), dtypes=(dtype,)) == []
    assert check(field, reference(field), dtypes=(dtype,), level="quick") == []


@pytest.mark.parametrize("field", SPECS)
def test_the_cpus_operations_pass(field):
    group, _, name = field.partition(".")
    assert check(field, getattr(getattr(CPU.ops, group), name)) == []


@pytest.mark.parametrize("field", [field for field, spec in SPECS.items() if spec.decompose])
def test_every_decomposition_equals_its_reference(field):
    assert check(field, SPECS[field].decompose(reference)) == []


@pytest.mark.parametrize("field", SPECS)
def test_what_is_called_graph_safe_can_be_captured(field):
    """On a platform whose graph records tensors: shapes, host numbers and everything read on the host are frozen."""
    assert check(field, reference(field), train=False, backend=ToyBackend()) == []


@pytest.mark.parametrize("field", ["search.beam_step", "linear.grouped_mm", "moe.experts"])
def test_references_that_claim_no_capture_cannot_be_captured(field):
    def unclaimed(*args):
        return reference(field)(*args)

    try:
        faults = check(field, unclaimed, train=False, backend=ToyBackend())
    except CheckRaised:
        return
    assert kinds(faults) == {"capture"}


def test_a_decomposition_claims_no_more_than_its_parts():
    parts = {
        "norm.rms_norm": op_claims(dtypes=(torch.bfloat16, torch.float32))(lambda *args: None),
        "rope.rotary": op_claims(dtypes=(torch.bfloat16,), train=False, graph_safe=False)(lambda *args: None),
    }
    made = SPECS["rope.qk_norm_rotary"].decompose(parts.__getitem__)
    assert claims_of(made) == Claims((torch.bfloat16,), train=False, graph_safe=False)


def test_a_decomposition_that_is_one_of_its_parts_leaves_that_parts_claims():
    parts = {name: op_claims(train=train)(lambda: None) for name, train in (("a.one", None), ("a.two", False))}
    spec = op(
        reference("norm.rms_norm"), "", None, tier="D", needs=tuple(parts), decompose=lambda lookup: lookup("a.one")
    )
    assert claims_of(spec["spec"].decompose(parts.__getitem__)).train is False
    assert claims_of(parts["a.one"]).train is None


# Faults, each in an operation that is right otherwise.


def rms_norm(x, weight, eps):
    return reference("norm.rms_norm")(x, weight, eps)


def one_wrong_value(x, weight, eps):
    out = rms_norm(x, weight, eps)
    return torch.cat((out[:, :-1], out[:, -1:] * 1.1), -1)


def not_a_number(x, weight, eps):
    return rms_norm(x, weight, eps) + float("nan")


def always_fp64(x, weight, eps):
    return rms_norm(x, weight, eps).double()


def one_more_dim(x, weight, eps):
    return rms_norm(x, weight, eps)[None]


def in_a_list(x, weight, eps):
    return [rms_norm(x, weight, eps)]


def nothing_at_all(x, weight, eps):
    return None


def writes_its_input(x, weight, eps):
    out = rms_norm(x, weight, eps)
    x.detach()[0, 0] += 1
    return out


def returns_its_input(x, weight, eps):
    with torch.no_grad():
        out = x.copy_(rms_norm(x.clone(), weight, eps))
    return out.view_as(out)


def no_gradient(x, weight, eps):
    return rms_norm(x, weight, eps).detach()


def no_gradient_of_the_weight(x, weight, eps):
    return rms_norm(x, weight.detach(), eps)


class HalfBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def wrong_gradient(x, weight, eps):
    return HalfBackward.apply(rms_norm(x, weight, eps))


def reads_rows_as_if_contiguous(x, weight, eps):
    packed = x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())
    return rms_norm(packed, weight, eps)


def writes_beside_a_view(x, weight, eps):
    out = rms_norm(x, weight, eps)
    if x.storage_offset():
        torch.as_strided(x.detach(), (1,), (1,), x.storage_offset() - 1).zero_()
    return out


FAULTS = [
    (one_wrong_value, {"value"}),
    (not_a_number, {"value"}),
    (always_fp64, {"dtype"}),
    (one_more_dim, {"shape"}),
    (in_a_list, {"structure"}),
    (nothing_at_all, {"structure"}),
    (writes_its_input, {"argument_written"}),
    (returns_its_input, {"argument_written", "aliasing"}),
    (no_gradient, {"gradient"}),
    (no_gradient_of_the_weight, {"gradient"}),
    (wrong_gradient, {"gradient"}),
    (reads_rows_as_if_contiguous, {"strided"}),
    (writes_beside_a_view, {"argument_written"}),
]


@pytest.mark.parametrize(("function", "expected"), FAULTS, ids=[function.__name__ for function, _ in FAULTS])
def test_a_planted_fault_is_found(function, expected):
    faults = check("norm.rms_norm", function)
    assert kinds(faults) == expected
    assert {fault.dtype for fault in faults} == {"float32", "bfloat16", "float16"}


def test_frozen_at_capture():
    class Memory:
        def __init__(self):
            self.known = {}

        def __call__(self, x, weight, eps):
            key = x.data_ptr(), tuple(x.shape), x.dtype
            if not torch.is_grad_enabled() and key in self.known:
                return self.known[key].clone()
            self.known = {key: rms_norm(x, weight, eps)}
            return self.known[key].clone()

    class Twice(type(CPU.graph)):
        def capture(self, function, pool=None):
            function()
            return super().capture(function, pool)

    faults = check_op(
        "norm.rms_norm",
        SPECS["norm.rms_norm"],
        Memory(),
        runtime=CPU.runtime,
        graph=Twice(),
        dtypes=FLOATS,
        train=False,
        level="quick",
    )
    assert kinds(faults) == {"capture"}


def test_host_values_are_frozen_at_capture():
    def reads_on_the_host(x, weight, eps):
        factor = float(np.abs(x.numpy()).sum())  # unseen by the recorder, as a raw pointer would be
        return rms_norm(x, weight, eps) * (factor / x.abs().sum())

    assert check("norm.rms_norm", reads_on_the_host, dtypes=(torch.float32,), train=False) == []
    toy = check("norm.rms_norm", reads_on_the_host, dtypes=(torch.float32,), train=False, backend=ToyBackend())
    assert kinds(toy) == {"capture"}


def test_the_quick_check_takes_one_dtype_and_no_views():
    seen = []

    def watched(x, weight, eps):
        seen.append((x.dtype, x.is_contiguous()))
        return rms_norm(x, weight, eps)

    assert check("norm.rms_norm", watched, dtypes=(torch.float16, torch.bfloat16), level="quick") == []
    assert set(seen) == {(torch.bfloat16, True)}  # the first of the specification's that the device supports
    assert check("norm.rms_norm", watched) == []
    assert set(seen) == {(dtype, contiguous) for dtype in FLOATS for contiguous in (True, False)}


def test_what_is_not_claimed_is_not_checked():
    bf16_only = op_claims(dtypes=(torch.bfloat16,))(
        lambda x, weight, eps: rms_norm(x, weight, eps) if x.dtype == torch.bfloat16 else None
    )
    assert check("norm.rms_norm", bf16_only) == []
    assert kinds(check("norm.rms_norm", bf16_only, dtypes=(torch.float32,))) == {"no_dtype"}
    infer_only = op_claims(train=False)(no_gradient)
    assert check("norm.rms_norm", infer_only) == []
    assert check("norm.rms_norm", no_gradient, train=False) == []


@pytest.mark.parametrize("raised", [ValueError("no such kernel"), SystemExit(3)], ids=repr)
def test_an_exception_names_the_operation_and_keeps_its_cause(raised):
    def broken(x, weight, eps):
        raise raised

    with pytest.raises(CheckRaised, match=r"norm\.rms_norm") as caught:
        check("norm.rms_norm", broken, level="quick")
    assert caught.value.__cause__ is raised
    assert (caught.value.field, caught.value.dtype) == ("norm.rms_norm", "float32")


def test_a_missing_operation_says_so():
    with pytest.raises(CheckRaised) as caught:
        check("norm.rms_norm", MISSING, level="quick")
    assert isinstance(caught.value.__cause__, HardwareError)
    assert caught.value.__cause__.code == "op_not_available"


# Faults that only other operations can have.


def write_all_but_the_last(key, value, key_cache, value_cache, slots):
    reference("kv.write")(key[:-1], value[:-1], key_cache, value_cache, slots[:-1])


def write_one_row_too_many(key, value, key_cache, value_cache, slots):
    reference("kv.write")(key, value, key_cache, value_cache, slots)
    others = torch.ones(len(key_cache), dtype=torch.bool)
    others[slots] = False
    key_cache[others.nonzero()[0]] += 1


def write_a_slot(key, value, key_cache, value_cache, slots):
    reference("kv.write")(key, value, key_cache, value_cache, slots)
    slots[0] += 1


def other_parents(*args):
    beams = reference("search.beam_step")(*args)
    return replace(beams, parent=beams.parent.clone().fill_(0))


def writes_the_trie(logits, normalizer, beams, trie, *rest):
    found = reference("search.beam_step")(logits, normalizer, beams, trie, *rest)
    trie.code[0] += 1
    return found


def returns_the_beams(logits, normalizer, beams, *rest):
    return replace(reference("search.beam_step")(logits, normalizer, beams, *rest), score=beams.score)


def forgets_the_scale(x):
    quantized, scale = reference("linear.quantize_fp8")(x)
    return quantized, torch.ones_like(scale)


def doubles_the_scale(x):
    quantized, scale = reference("linear.quantize_fp8")(x)
    return (quantized.float() / 2).to(quantized.dtype), scale * 2


def quantizes_with_one_bit_less(x):
    quantized, scale = reference("linear.quantize_fp8")(x)
    return quantized.to(torch.float8_e5m2).to(quantized.dtype), scale


def softmax_in_bf16(logits, temperature):
    return (logits.bfloat16() / temperature.bfloat16()[:, None]).softmax(-1).float()


def route_without_weights(router_logits, top_k, renormalize):
    weights, experts = reference("moe.route")(router_logits, top_k, renormalize)
    return torch.full_like(weights, 1 / top_k), experts


def rotates_nothing(product, q_weight, k_weight, cos, sin, eps, kv_heads):
    return (q_weight, *reference("rope.qkv_norm_rotary")(product, q_weight, k_weight, cos, sin, eps, kv_heads)[1:])


def norm_without_the_last(gradients):
    return reference("optim.total_norm")(gradients[:-1])


def norm_in_bf16(gradients):
    return reference("optim.total_norm")(gradients).bfloat16().float()


def scales_the_gradients(gradients):
    norm = reference("optim.total_norm")(gradients)
    gradients[0].mul_(0.5)
    return norm


OTHER_FAULTS = [
    ("kv.write", write_all_but_the_last, {"value"}),
    ("kv.write", write_one_row_too_many, {"value"}),
    ("kv.write", write_a_slot, {"argument_written"}),
    ("search.beam_step", other_parents, {"value"}),
    ("search.beam_step", writes_the_trie, {"argument_written"}),
    ("search.beam_step", returns_the_beams, {"shape", "aliasing"}),
    ("rope.qkv_norm_rotary", rotates_nothing, {"shape", "aliasing"}),
    ("linear.quantize_fp8", forgets_the_scale, {"value"}),
    ("linear.quantize_fp8", doubles_the_scale, {"value"}),
    ("linear.quantize_fp8", quantizes_with_one_bit_less, {"value"}),
    ("sampling.softmax", softmax_in_bf16, {"value"}),
    ("moe.route", route_without_weights, {"value"}),
    ("optim.total_norm", norm_without_the_last, {"value"}),
    ("optim.total_norm", norm_in_bf16, {"value"}),
    ("optim.total_norm", scales_the_gradients, {"argument_written"}),
]


@pytest.mark.parametrize(
    ("field", "function", "expected"), OTHER_FAULTS, ids=[function.__name__ for _, function, _ in OTHER_FAULTS]
)
def test_a_fault_in_another_kind_of_operation_is_found(field, function, expected):
    not_captured = op_claims(graph_safe=False)(function)
    for dtype in SPECS[field].dtypes:
        assert kinds(check(field, not_captured, dtypes=(dtype,))) == expected


def test_a_result_may_be_a_view_of_what_the_specification_names():
    field, view = "rope.qkv_norm_rotary", SPECS["rope.qkv_norm_rotary"]
    assert view.views == ("product",)
    assert check(field, view.reference) == []
    faults = check_op(
        field,
        replace(view, views=()),
        view.reference,
        runtime=CPU.runtime,
        graph=CPU.graph,
        dtypes=FLOATS,
        train=True,
        level="full",
    )
    assert kinds(faults) == {"aliasing"}


def drawn_tensors(case):
    return [found for name, value in case.items() for found in tensors(value, name)]


@pytest.mark.parametrize("field", SPECS)
def test_two_draws_of_a_case_have_one_shape_and_other_values(field):
    """What the check of a capture rests on."""
    spec = SPECS[field]
    for full in (False, True):
        drawn = [list(spec.cases(Draw(spec.dtypes[0], seed, full=full))) for seed in (0, 1)]
        for one, other in zip(*drawn, strict=True):
            pairs = list(zip(drawn_tensors(one), drawn_tensors(other), strict=True))
            assert all((name, part.shape) == (its, like.shape) for (name, part), (its, like) in pairs)
            assert not all(torch.equal(part.float(), like.float()) for (_, part), (_, like) in pairs)
