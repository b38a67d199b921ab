"""Triton kernels against their references and against float64 arithmetic: one body for a device and for Triton's interpreter.

`test_cuda_kernels.py` runs this file in a process of its own, since Triton decides at its import whether to interpret.
"""

from __future__ import annotations

import importlib
from itertools import product

import numpy as np
import pytest
import torch
from beam_bodies import beam_tests
from conversions import INTERPRETED, backend_of_bodies, converted
from e4m3 import VALUES, decode

from polyrec.hardware.backends.cuda_like import CUDA_LIKE_OPS, cuda_like_ops
from polyrec.hardware.backends.cuda_like.kernels.rows import rows_of
from polyrec.hardware.backends.cuda_like.ops import beams, few_rows, launch, linear, loss
from polyrec.hardware.backends.cuda_like.ops.launch import kernels
from polyrec.hardware.backends.cuda_like.ops.rope import heads_together
from polyrec.hardware.ops import act as reference_act
from polyrec.hardware.ops import kv as reference_kv
from polyrec.hardware.ops import loss as reference_loss
from polyrec.hardware.ops import norm as reference_norm
from polyrec.hardware.ops import op_groups
from polyrec.hardware.ops import rope as reference_rope
from polyrec.hardware.ops import search as reference_search
from polyrec.hardware.ops.check import check_op, map_arguments
from polyrec.hardware.ops.search import Beams, NodeFilter, TrieArrays
from polyrec.hardware.ops.spec import FP8, TOLERANCES, group_specs

# Of one result against float64, in units of the rounding of its dtype.
LOOSE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(LOOSE)
E4M3 = np.unique(VALUES[np.isfinite(VALUES)])
# Rows and sizes; the interpreter takes milliseconds for a program, a device takes them all.
SHAPES = [(1000, 64), (3, 100), (1, 128), (3, 2048), (1, 6144), (3, 10000)]
SHAPES += [] if INTERPRETED else [(1000, 100), (1000, 128), (1000, 2048), (1000, 6144), (5000, 2048)]
OPS = cuda_like_ops(triton=True, fp8=True)
PACKAGE = "polyrec.hardware.backends.cuda_like.kernels."


def checking(executor):
    """What stands in for the interpreter's launch, which takes any number of warps."""

    class Checking(executor):
        def __call__(self, *arguments, num_warps=4, **options):
            assert num_warps in (1, 2, 4, 8, 16, 32)
            return super().__call__(*arguments, **options)

    return Checking


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Lets the kernels run on the host where Triton interprets them."""
    if INTERPRETED:
        import triton.runtime.interpreter

        monkeypatch.setattr(triton.runtime.interpreter, "_convert_float", converted)
        monkeypatch.setattr(
            triton.runtime.interpreter, "GridExecutor", checking(triton.runtime.interpreter.GridExecutor)
        )
        for module in (launch, loss):
            monkeypatch.setattr(module, "on_accelerator", lambda x: True)
        monkeypatch.setattr(linear, "is_tuned", lambda device: True)
        monkeypatch.setattr(beams, "BLOCK", 64)  # several, where there are few candidates


@pytest.fixture(scope="module")
def backend():
    return backend_of_bodies()


@pytest.fixture
def device(backend):
    return backend.runtime.device


class Random:
    """Tensors on the device from one seed; views are the middle third of rows three times as wide."""

    def __init__(self, device, dtype):
        self.device, self.dtype, self.generator = device, dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape, scale=1.0, dtype=None, view=False):
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        tensor = values.to(dtype or self.dtype).to(self.device)
        if not view:
            return tensor
        rows = tensor.reshape(shape[0], -1)
        wide = torch.cat((rows + 1, rows, rows - 1), 1)
        return wide[:, rows.shape[1] : 2 * rows.shape[1]].unflatten(1, shape[1:])

    def angles(self, *shape):
        angle = torch.rand(shape, generator=self.generator) * 6 - 3
        return angle.cos().to(self.device), angle.sin().to(self.device)

    def slots(self, total, count):
        return torch.randperm(total, generator=self.generator)[:count].to(self.device)


def exact(tensor):
    return tensor.detach().cpu().double().numpy()


def close(found, expected, dtype=None):
    """dtype: the one whose rounding counts, where it is not the result's."""
    loose = LOOSE[dtype or found.dtype]
    np.testing.assert_allclose(exact(found), expected, rtol=loose, atol=loose)


def close_quantised(quantised, scale, expected, loose=LOOSE[torch.float32]):
    """The scale by itself, then every code: an e4m3 number nearest to expected / scale, but for the rounding of the latter."""
    assert quantised.dtype == FP8
    assert scale.dtype == torch.float32
    wanted = np.abs(expected).max(-1, keepdims=True) / 448
    np.testing.assert_allclose(exact(scale), wanted, rtol=loose)
    codes, numbers = decode(quantised.cpu()), expected / wanted
    above = np.searchsorted(E4M3, numbers).clip(1, len(E4M3) - 1)
    nearest = np.minimum(np.abs(E4M3[above] - numbers), np.abs(E4M3[above - 1] - numbers))
    assert (np.abs(codes - numbers) <= nearest + 448 * loose).all()


def normed(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rounded(values, dtype):
    return torch.from_numpy(values).to(dtype).double().numpy()


def rotated(x, cos, sin):
    """x [T, H, D] -> halves turned; cos and sin [T, D / 2]."""
    first, second = np.split(x, 2, -1)
    cos, sin = exact(cos)[:, None], exact(sin)[:, None]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)


# --- the shared test body


def fields():
    """`group.field` of what differs from the groups without Triton, and of the products on the device."""
    for group, cls in op_groups().items():
        for field, spec in group_specs(cls).items():
            function = getattr(getattr(OPS, group), field)
            if function is not getattr(getattr(CUDA_LIKE_OPS, group), field) or (
                not INTERPRETED and field == "grouped_mm"
            ):
                yield pytest.param(f"{group}.{field}", spec, function, id=f"{group}.{field}")


@pytest.mark.parametrize(("field", "spec", "function"), list(fields()))
def test_each_kernel_equals_its_reference(backend, field, spec, function):
    dtypes = (torch.float32, torch.bfloat16) if INTERPRETED else backend.capabilities.dtypes
    if INTERPRETED and field == "search.restricted_log_softmax":
        dtypes = (torch.float32,)  # torch's product with fp32 sums needs a device
    faults = check_op(
        field, spec, function, runtime=backend.runtime, graph=backend.graph, dtypes=dtypes, train=True, level="full"
    )
    assert faults == [], "\n".join(map(str, faults))


def test_these_are_all_kernels():
    assert {param.id for param in fields()} >= {
        *(f"norm.{name}" for name in ("rms_norm", "add_rms_norm", "rms_norm_fp8", "add_rms_norm_fp8")),
        *(f"norm.{name}" for name in ("add_rms_norm_mm", "mm_add_rms_norm_fp8")),
        *(f"act.{name}" for name in ("silu_and_mul", "silu_and_mul_fp8", "silu_and_mul_mm")),
        *(f"rope.{name}" for name in ("angles", "rotary", "rotary_store", "qk_norm_rotary", "qk_norm_rotary_store")),
        "rope.qkv_norm_rotary",
        *(f"linear.{name}" for name in ("quantize_fp8", "quantize_fp8_blocks", "scaled_mm", "block_scaled_mm")),
        *(f"kv.{name}" for name in ("write", "copy_pages", "locate")),
        *(f"search.{name}" for name in ("beam_step", "next_rows", "restricted_log_softmax")),
    }


# --- odd shapes, views of wider rows, against float64


@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_norms(device, rows, size, dtype, view):
    draw = Random(device, dtype)
    x, residual, weight = draw(rows, size, scale=3, view=view), draw(rows, size), draw(size)
    gain, summed = exact(weight), rounded(exact(x) + exact(residual), dtype)
    close(OPS.norm.rms_norm(x, weight, 1e-6), normed(exact(x), gain, 1e-6))
    out, total = OPS.norm.add_rms_norm(x, residual, weight, 1e-6)
    close(total, summed)
    close(out, normed(exact(total), gain, 1e-6))


@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_norms_with_quantised_rows(device, rows, size, view):
    draw = Random(device, torch.float16)
    x, residual, weight = draw(rows, size, scale=3, view=view), draw(rows, size, view=view), draw(size)
    close_quantised(*OPS.norm.rms_norm_fp8(x, weight, 1e-6), normed(exact(x), exact(weight), 1e-6))
    quantised, scale, total = OPS.norm.add_rms_norm_fp8(x, residual, weight, 1e-6)
    close(total, exact(x) + exact(residual))
    close_quantised(quantised, scale, normed(exact(total), exact(weight), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_of_heads_takes_a_view_of_the_product(device, dtype):
    draw = Random(device, dtype)
    x, weight = draw(5, 3, 100, view=True), draw(100)
    assert not x.is_contiguous()
    close(OPS.norm.rms_norm(x, weight, 1e-6), normed(exact(x), exact(weight), 1e-6))


@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_swiglu(device, rows, size, dtype, view):
    rows = min(rows, 50) if INTERPRETED else rows
    x = Random(device, dtype)(rows, 2 * size, scale=3, view=view)
    gate, up = np.split(exact(x), 2, -1)
    expected = gate / (1 + np.exp(-gate)) * up
    close(OPS.act.silu_and_mul(x), expected)
    close_quantised(*OPS.act.silu_and_mul_fp8(x), expected)


@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
@pytest.mark.parametrize(("rows", "size"), [*SHAPES, (2, 20000)])
def test_quantised_rows(device, rows, size, view):
    x = Random(device, torch.float16)(rows, size, scale=3, view=view)
    x[-1, -1], x[0, 0] = -50, 60  # the largest of a row last, and first
    close_quantised(*OPS.linear.quantize_fp8(x), exact(x))


def test_a_row_of_zeros_and_a_row_with_a_nan(device):
    x = Random(device, torch.float32)(3, 64)
    x[0], x[1, 7] = 0, float("nan")
    quantised, scale = OPS.linear.quantize_fp8(x)
    assert decode(quantised[:1].cpu()).tolist() == [[0.0] * 64]
    assert float(scale[0]) == torch.finfo(torch.float32).tiny
    assert np.isnan(decode(quantised[1:2].cpu()))[0, 7]
    close_quantised(quantised[2:], scale[2:], exact(x[2:]))


HEADS = [(1, 2, 1, 64), (3, 3, 1, 100), (3, 16, 8, 128), (2, 32, 32, 96)]
HEADS += [] if INTERPRETED else [(1000, 16, 8, 128), (1000, 12, 2, 64), (1000, 32, 32, 96)]
CACHES = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, FP8: 0.07}


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "size"), HEADS)
def test_rotation_and_the_write_into_caches(device, tokens, heads, kv_heads, size, dtype, norm, cache):
    """q, k and v are the parts of one product's rows; rows of the caches that no slot names stay as they were."""
    draw = Random(device, dtype)
    product = draw(tokens, (heads + 2 * kv_heads) * size).unflatten(1, (-1, size))
    q, k, v = product.split((heads, kv_heads, kv_heads), 1)
    v[-1, -1, -1] = 1000  # beyond e4m3
    cos, sin = draw.angles(tokens, size // 2)
    slots = draw.slots(2 * tokens + 1, tokens)
    before = torch.full((2 * tokens + 1, kv_heads, size), 7.0, device=device).to(cache)
    keys, values = before.clone(), before.clone()
    weights = (draw(size), draw(size)) if norm else ()
    if norm:
        found = OPS.rope.qk_norm_rotary_store(q, k, v, *weights, cos, sin, 1e-6, keys, values, slots)
        apart = OPS.rope.qk_norm_rotary(q, k, *weights, cos, sin, 1e-6)
    else:
        found = OPS.rope.rotary_store(q, k, v, cos, sin, keys, values, slots)
        apart = OPS.rope.rotary(q, k, cos, sin)
    for one, other in zip(found, apart, strict=True):
        if (
            norm
        ):  # for a narrower cache Triton lays the rows out otherwise (8 values a lane, not 4), and sums in that order
            close(one, exact(other))
        else:
            assert torch.equal(one, other)
    wide_q, wide_k = (
        normed(exact(x), exact(weight), 1e-6) if norm else exact(x)
        for x, weight in zip((q, k), weights or (q, k), strict=True)
    )
    close(found[0], rotated(wide_q, cos, sin))
    close(found[1], rotated(wide_k, cos, sin))
    check_cache(keys, before, slots, rotated(wide_k, cos, sin), max(CACHES[cache], LOOSE[torch.float32]))
    check_cache(values, before, slots, exact(v), CACHES[cache])


def check_cache(cache, before, slots, expected, loose):
    if cache.dtype == FP8:
        expected = expected.clip(-448, 448)
        assert (cache[slots].cpu().float().numpy() == decode(cache[slots].cpu())).all()
    np.testing.assert_allclose(exact(cache.float()[slots]), expected, rtol=loose, atol=max(loose / 8, 1e-5))
    rest = torch.ones(len(cache), dtype=torch.bool, device=cache.device)
    rest[slots] = False
    assert torch.equal(cache.float()[rest], before.float()[rest])


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
def test_writes_into_caches(device, view, cache):
    draw = Random(device, torch.bfloat16)
    key, value = draw(5, 3, 40, scale=300, view=view), draw(5, 3, 40, view=view)
    slots = draw.slots(11, 5)
    before = torch.full((11, 3, 40), 7.0, device=device).to(cache)
    keys, values = before.clone(), before.clone()
    assert OPS.kv.write(key, value, keys, values, slots) is None
    check_cache(keys, before, slots, exact(key), CACHES[cache])
    check_cache(values, before, slots, exact(value), CACHES[cache])


@pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=str)
def test_pages_move_along_a_chain(device, cache):
    """Each target is the next one's source: a copy that reads what it wrote ends with one page everywhere."""
    draw = Random(device, torch.float32)
    keys, values = (draw(6 * 4, 2, 24, dtype=cache) for _ in range(2))
    pages = [part.float().clone().unflatten(0, (6, 4)) for part in (keys, values)]
    source, target = torch.arange(0, 5, device=device), torch.arange(1, 6, device=device)
    OPS.kv.copy_pages(keys, values, source, target, 4)
    for part, was in zip((keys, values), pages, strict=True):
        assert torch.equal(part.float().unflatten(0, (6, 4)), was[[0, 0, 1, 2, 3, 4]])


def near(found, expected):
    """Within the layer's own tolerance: Hopper's matrix units keep about 14 bits of a sum of e4m3 products."""
    limit = TOLERANCES[found.dtype]
    np.testing.assert_allclose(exact(found), expected, rtol=limit.relative, atol=limit.absolute)


PRODUCTS = [(1, 128, 16), (3, 256, 208)]
PRODUCTS += [] if INTERPRETED else [(1, 2048, 4096), (65, 2048, 4096), (1000, 6144, 2048), (1000, 2048, 12288)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), PRODUCTS)
def test_block_scaled_products(device, rows, inputs, outputs, dtype):
    draw = Random(device, torch.float32)
    q, q_scale = OPS.linear.quantize_fp8_blocks(draw(rows, inputs))
    weight = draw(outputs, inputs).to(FP8)
    weight_scale = draw(-(-outputs // 128), inputs // 128).abs() * inputs**-0.5
    left = decode(q.cpu()) * exact(q_scale).repeat(128, 1)
    right = decode(weight.cpu()) * exact(weight_scale).repeat(128, 0)[:outputs].repeat(128, 1)
    found = OPS.linear.block_scaled_mm(q, q_scale, weight, weight_scale, dtype)
    assert found.dtype == dtype
    near(found, left @ right.T)


def scaled_product(device, rows, inputs, outputs, bias=None):
    """-> the first arguments of `scaled_mm`, and the product in float64. bias: its dtype, or None."""
    draw = Random(device, torch.float32)
    q, q_scale = OPS.linear.quantize_fp8(draw(rows, inputs))
    weight, weight_scale = OPS.linear.quantize_fp8(draw(outputs, inputs, scale=inputs**-0.5))
    offset = draw(outputs, dtype=bias) if bias else None
    expected = (decode(q.cpu()) * exact(q_scale)) @ (decode(weight.cpu()) * exact(weight_scale)).T
    return (q, q_scale, weight, weight_scale, offset), expected + (exact(offset) if bias else 0)


@pytest.mark.skipif(INTERPRETED, reason="torch's own products need a device")
@pytest.mark.parametrize("bias", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 2048, 4096), (3, 64, 16), (1000, 6144, 2048)])
@pytest.mark.parametrize("few", [False, True])
def test_scaled_products(monkeypatch, device, rows, inputs, outputs, bias, few):
    """Of any number of rows, by torch and by the kernel for few."""
    monkeypatch.setattr(few_rows, "takes", lambda rows, outputs: few)
    arguments, expected = scaled_product(device, rows, inputs, outputs, bias)
    near(OPS.linear.scaled_mm(*arguments, torch.bfloat16), expected)


# Whole tiles and others, one and several of rows and of columns, inputs cut into one, two and four parts, uncut for
# the number of rows, and not in steps.
FEW_ROWS = [(1, 128, 16), (3, 200, 208), (50, 4096, 24), (65, 384, 80), (5, 6144, 64), (3, 72, 40), (129, 2304, 16)]
MODEL = [(4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)]
FEW_ROWS += [] if INTERPRETED else [(rows, *reversed(shape)) for rows in (1, 16, 50, 100, 256, 500) for shape in MODEL]
ALIKE = [(60, 256, 48), (60, 6144, 48)]
ALIKE += [] if INTERPRETED else [(few_rows.SPLIT_ROWS, 6144, 2048), (256, 2048, 4096)]


@pytest.fixture
def all_few(monkeypatch):
    """Every product goes to the kernel for few rows."""
    monkeypatch.setattr(few_rows, "takes", lambda rows, outputs: True)
    monkeypatch.setattr(linear, "scaled_mm", None)


@pytest.mark.usefixtures("all_few")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), FEW_ROWS)
def test_products_of_few_rows(device, rows, inputs, outputs, bias, dtype):
    arguments, expected = scaled_product(device, rows, inputs, outputs, bias)
    found = OPS.linear.scaled_mm(*arguments, dtype)
    assert found.dtype == dtype
    near(found, expected)
    # Parts of the inputs are added in their order.
    assert all(torch.equal(found, OPS.linear.scaled_mm(*arguments, dtype)) for _ in range(1 if INTERPRETED else 20))


@pytest.mark.usefixtures("all_few")
@pytest.mark.parametrize(("rows", "inputs", "outputs"), FEW_ROWS[:5])
def test_every_tile_gives_the_product(monkeypatch, device, rows, inputs, outputs):
    """Whichever shape it is chosen for; and on a device with the same bits, since each keeps the order of the sums."""
    arguments, expected = scaled_product(device, rows, inputs, outputs)
    for splits in {few_rows.splits_of(rows, inputs), 1}:
        same = []
        for columns in few_rows.COLUMNS:
            tiling = few_rows.Tiling(few_rows.ROWS, columns, splits, few_rows.DEPTH, few_rows.STAGES, few_rows.WARPS)
            monkeypatch.setattr(few_rows, "tiling", lambda *shape, tiling=tiling: tiling)
            same.append(OPS.linear.scaled_mm(*arguments, torch.bfloat16))
            near(same[-1], expected)
        assert INTERPRETED or all(torch.equal(one, same[0]) for one in same)


@pytest.mark.usefixtures("all_few")
@pytest.mark.parametrize(("rows", "inputs", "outputs"), ALIKE)
def test_a_row_of_few_does_not_depend_on_the_others(device, rows, inputs, outputs):
    """Nor on how many they are, up to where inputs are cut; on a device also where the tile changes with them."""
    (q, q_scale, weight, weight_scale, _), _ = scaled_product(device, rows, inputs, outputs)
    whole = OPS.linear.scaled_mm(q, q_scale, weight, weight_scale, None, torch.bfloat16)
    few = slice(30, 33)
    assert torch.equal(
        OPS.linear.scaled_mm(q[few], q_scale[few], weight, weight_scale, None, torch.bfloat16), whole[few]
    )
    others = torch.full_like(q, float("nan"))
    others[few] = q[few]
    assert torch.equal(
        OPS.linear.scaled_mm(others, q_scale, weight, weight_scale, None, torch.bfloat16)[few], whole[few]
    )


@pytest.mark.usefixtures("all_few")
@pytest.mark.parametrize("inputs", [96, 200, 6144])
def test_few_rows_may_be_a_view(device, inputs):
    (q, *rest), _ = scaled_product(device, 5, inputs, 48)
    wide = torch.cat((q.view(torch.uint8), q.view(torch.uint8) ^ 1), 1).view(FP8)[:, :inputs]
    assert not wide.is_contiguous()
    assert torch.equal(OPS.linear.scaled_mm(wide, *rest, torch.float16), OPS.linear.scaled_mm(q, *rest, torch.float16))


# Rows, inputs and outputs: cut into two, four, three (which no rule chooses) and eight parts; uncut for the number of rows
# and of inputs; several rows a program of the norm.
BEFORE_NORMS = [
    (1, 256, 1024, 2),
    (5, 6144, 48, 4),
    (3, 768, 80, 3),
    (2, 1024, 1040, 8),
    (129, 2304, 16, 1),
    (3, 96, 64, 1),
]
BEFORE_NORMS += [] if INTERPRETED else [(rows, 6144, 2048, 4) for rows in (1, 16, 50, 100, 128)]
BEFORE_NORMS += (
    [] if INTERPRETED else [(128, 6144, 4096, 4), (50, 9728, 2560, 4), (100, 4096, 5120, 2), (256, 6144, 2048, 1)]
)


@pytest.mark.usefixtures("all_few")
@pytest.mark.parametrize(("bias", "view"), [(False, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs", "splits"), BEFORE_NORMS)
def test_a_norm_adds_up_the_parts_to_the_product_s_bits(
    monkeypatch, device, rows, inputs, outputs, splits, bias, dtype, view
):
    """One kernel less than the product and the norm after it, and every bit of theirs."""
    monkeypatch.setattr(few_rows, "splits_of", lambda rows, inputs: splits)
    arguments, expected = scaled_product(device, rows, inputs, outputs, dtype if bias else None)
    draw = Random(device, dtype)
    residual, weight = draw(rows, outputs, view=view), draw(outputs)
    assert residual.is_contiguous() is not view or rows == 1
    sums = []
    adding = kernels("few_rows_mm").few_rows_scaled_mm_sum
    monkeypatch.setattr(
        kernels("few_rows_mm"), "few_rows_scaled_mm_sum", lambda *given: (sums.append(given), adding(*given))
    )
    found = OPS.norm.mm_add_rms_norm_fp8(*arguments, residual, weight, 1e-6)
    assert sums == []
    product = OPS.linear.scaled_mm(*arguments, dtype)
    assert len(sums) == (splits > 1)
    apart = OPS.norm.add_rms_norm_fp8(product, residual, weight, 1e-6)
    for one, other in zip(found, apart, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    near(found[2], expected + exact(residual))
    close_quantised(*found[:2], normed(exact(found[2]), exact(weight), 1e-6))


# --- what the wrappers promise


def test_views_are_not_copied(device):
    draw = Random(device, torch.bfloat16)
    for x in (draw(5, 64, view=True), draw(5, 3, 64, view=True)):
        assert rows_of(x).tensor is x
    assert heads_together(x) is x
    assert heads_together(x.transpose(0, 1)).is_contiguous()


def test_a_row_does_not_depend_on_its_batch(device):
    draw = Random(device, torch.bfloat16)
    x, residual, weight = draw(70, 256), draw(70, 256), draw(128)
    few = slice(30, 33)
    for whole, part in (
        (OPS.norm.add_rms_norm(x, residual, x[0], 1e-6), OPS.norm.add_rms_norm(x[few], residual[few], x[0], 1e-6)),
        (OPS.norm.rms_norm_fp8(x, x[0], 1e-6), OPS.norm.rms_norm_fp8(x[few], x[0], 1e-6)),
        (OPS.norm.rms_norm_fp8(x[:, :128], weight, 1e-6), OPS.norm.rms_norm_fp8(x[few, :128], weight, 1e-6)),
        (OPS.act.silu_and_mul_fp8(x), OPS.act.silu_and_mul_fp8(x[few])),
    ):
        for one, other in zip(whole, part, strict=True):
            assert torch.equal(one[few].float(), other.float())


def test_no_rows(device):
    draw = Random(device, torch.bfloat16)
    x, weight = draw(0, 64), draw(64)
    assert OPS.norm.rms_norm(x, weight, 1e-6).shape == (0, 64)
    assert [part.shape for part in OPS.act.silu_and_mul_fp8(x)] == [(0, 32), (0, 1)]
    q, k = OPS.rope.rotary(draw(0, 2, 64), draw(0, 1, 64), *draw.angles(0, 32))
    assert (q.shape, k.shape) == ((0, 2, 64), (0, 1, 64))


# --- backward passes: each against float64 autograd of the reference, where the shared body's few rows say too little


def pulled(function, *inputs):
    """Gradients, by float64 autograd, of Σ result · cotangent; inputs: (tensor or constant, …), results' cotangents last."""
    *inputs, cotangents = inputs
    wide = [x.detach().cpu().double() if isinstance(x, torch.Tensor) else x for x in inputs]
    leaves = [x.requires_grad_() for x in wide if isinstance(x, torch.Tensor)]
    results = function(*wide)
    results = results if isinstance(results, tuple) else (results,)
    pairs = zip(results, cotangents, strict=True)
    total = sum((result * cotangent.detach().cpu().double()).sum() for result, cotangent in pairs)
    return [exact(gradient) for gradient in torch.autograd.grad(total, leaves, allow_unused=True)]


def near_whole(found, expected, dtype=None):
    """Relative to the whole tensor: a sum over rows has rounding of its largest terms."""
    loose = LOOSE[dtype or found.dtype]
    np.testing.assert_allclose(exact(found), expected, rtol=loose, atol=4 * loose * np.abs(expected).max())


GRADIENT_DTYPES = [torch.float32, torch.float16] if INTERPRETED else DTYPES


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(3, 32), (2, 100), (2, 1500), (1, 6144)])
def test_gradient_of_swiglu(device, dtype, view, rows, size):
    draw = Random(device, dtype)
    x, slope = draw(rows, 2 * size, view=view), draw(rows, size, view=view)
    x_gradient, again = torch.empty(rows, 2 * size, dtype=dtype, device=device), slope.clone()
    backward = kernels("swiglu_backward").silu_and_mul_backward
    backward(x, slope, x_gradient, None)
    expected = pulled(reference_act.silu_and_mul, x, (slope,))[0]
    close(x_gradient, expected)
    backward(x, again, x_gradient.zero_(), again)
    close(x_gradient, expected)
    assert torch.equal(again, OPS.act.silu_and_mul(x)), "the activations again, bit for bit, in the gradient's place"


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(23, 64), (37, 100), (7, 2048), (1, 3000)])
def test_gradient_of_rms_norm(device, dtype, stream, rows, size, monkeypatch):
    """Few programs, so that each has several tiles of rows, the last ones not full."""
    monkeypatch.setattr(importlib.import_module(PACKAGE + "norm_backward"), "PROGRAMS", 2)
    draw = Random(device, dtype)
    x, slope, weight = draw(rows, size, scale=3, view=True), draw(rows, size, view=True), draw(size)
    by_total = draw(rows, size, view=True) if stream else None
    backward = kernels("norm_backward").rms_norm_backward
    by_x, by_weight, normed = backward(x, weight, 1e-5, slope, by_total, again=True)
    expected = pulled(lambda x, w: reference_norm.rms_norm(x, w, 1e-5), x, weight, (slope,))
    near_whole(by_x, expected[0] + (exact(by_total) if stream else 0))
    near_whole(by_weight, expected[1])
    again = OPS.norm.rms_norm(x, weight, 1e-5)
    # Of two squares a compiler chooses the one that is rounded before their sum, which fp32 may show.
    if dtype == torch.float32 and not INTERPRETED:
        torch.testing.assert_close(normed, again, rtol=1e-6, atol=0)
    else:
        assert torch.equal(normed, again), "the normed rows again, bit for bit"
    first, _, nothing = backward(x, weight, 1e-5, slope, by_total, again=False)
    assert nothing is None
    assert torch.equal(first, by_x)


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), [(5, 4, 2, 64), (7, 3, 1, 24), (1, 16, 8, 128)])
def test_gradient_of_norms_and_rotation(device, dtype, value, tokens, heads, kv_heads, dim, monkeypatch):
    """value: a third gradient is copied. What stands around the outs' parts of wider rows stays."""
    monkeypatch.setattr(importlib.import_module(PACKAGE + "rotary_backward"), "PROGRAMS", 2)
    draw = Random(device, dtype)
    q, k = draw(tokens, heads, dim, scale=2, view=True), draw(tokens, kv_heads, dim, scale=2, view=True)
    weights = draw(dim), draw(dim)
    slopes = tuple(draw(tokens, count, dim, view=True) for count in (heads, kv_heads, kv_heads)[: 2 + value])
    wide = draw(tokens, sum(slope.shape[1] for slope in slopes) + 1, dim)
    before, outs = wide.clone(), wide[:, :-1].split([slope.shape[1] for slope in slopes], 1)
    cos, sin = draw.angles(tokens, dim // 2)
    by_weights = kernels("rotary_backward").rotate_backward(q, k, weights, cos, sin, 1e-5, slopes, outs)
    angles = cos.cpu().double(), sin.cpu().double()
    reference = lambda *inputs: reference_rope.qk_norm_rotary(*inputs, *angles, 1e-5)  # noqa: E731
    expected = pulled(reference, q, k, *weights, slopes[:2])
    for one, wanted in zip((*outs[:2], *by_weights), expected, strict=True):
        near_whole(one, wanted)
    assert not value or torch.equal(outs[2], slopes[2])
    assert torch.equal(wide[:, -1], before[:, -1])


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("asked", [(0, 1, 2), (0, 1), (2,), (1, 2)], ids=str)
def test_gradient_of_a_product_is_written_whole(device, dtype, asked):
    """asked: which of q, k and v went on; what did not gets zeros."""
    tokens, heads, kv_heads, dim = 5, 4, 2, 32
    draw = Random(device, dtype)
    product, weights = draw(tokens, (heads + 2 * kv_heads) * dim, scale=2), (draw(dim), draw(dim))
    slopes = [draw(tokens, count, dim) * (part in asked) for part, count in enumerate((heads, kv_heads, kv_heads))]
    cos, sin = draw.angles(tokens, dim // 2)
    angles = cos.cpu().double(), sin.cpu().double()
    reference = lambda *inputs: reference_rope.qkv_norm_rotary(*inputs, *angles, 1e-5, kv_heads)  # noqa: E731
    expected = pulled(reference, product, *weights, slopes)
    leaves = [one.requires_grad_() for one in (product, *weights)]
    found = OPS.rope.qkv_norm_rotary(*leaves, cos, sin, 1e-5, kv_heads)
    assert found[2].data_ptr() == product.data_ptr() + (heads + kv_heads) * dim * product.element_size(), "no copy of v"
    assert len({part.grad_fn for part in found}) == 1, "nothing joins gradients"
    pull = sum((found[part].double() * slopes[part].double()).sum() for part in asked)
    for one, wanted in zip(torch.autograd.grad(pull, leaves), expected, strict=True):
        near_whole(one, wanted)
    plain = OPS.rope.qk_norm_rotary(*(part.detach() for part in reference_rope.parts_of(product, dim, kv_heads)[:2]),
                                    *(weight.detach() for weight in weights), cos, sin, 1e-5)  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=False)), "bit for bit"


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("asked", [(True, False), (False, True), (True, True)])
def test_gradient_of_a_sum_of_losses(device, dtype, factor, asked, monkeypatch):
    """factor: of the sum's own gradient, by which those that were made in the forward pass are multiplied. Rows of logits are
    read in three pieces, the last one not full."""
    monkeypatch.setattr(importlib.import_module(PACKAGE + "loss"), "CHUNK", 16)
    draw = Random(device, dtype)
    hidden, weight, scale = draw(5, 32), draw(40, 32, scale=0.3), draw(5, dtype=torch.float32).abs()
    targets = torch.tensor([3, 0, 39, 7, 7], device=device)
    reference = lambda *both: reference_loss.weighted_cross_entropy(*both, targets.cpu(), scale.cpu().double())[0]  # noqa: E731
    expected = pulled(reference, hidden, weight, (torch.tensor(factor),))
    for one, wanted in zip((hidden, weight), asked, strict=True):
        one.requires_grad_(wanted)
    total, _ = OPS.loss.weighted_cross_entropy(hidden, weight, targets, scale)
    (total * factor).backward(retain_graph=True)
    for one, wanted, of in zip((hidden, weight), asked, expected, strict=True):
        assert (one.grad is not None) == wanted
        if wanted:
            near_whole(one.grad, of)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("size", [0, 1, 100, 30_000])
@pytest.mark.parametrize("factor", [1.0, -0.7, float("nan")])
def test_a_product_with_one_number(device, size, factor, monkeypatch):
    monkeypatch.setattr(importlib.import_module(PACKAGE + "loss"), "PROGRAMS", 3)
    draw = Random(device, torch.float32)
    values = draw(size + 1)
    expected = torch.cat((values[:size] * factor, values[size:]))
    kernels("loss").scale(values[:size], torch.tensor(factor, device=device))
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_gradients_of_no_rows(device):
    draw = Random(device, torch.float32)
    x, weight = draw(0, 64).requires_grad_(), draw(64).requires_grad_()
    OPS.norm.rms_norm(x, weight, 1e-6).sum().backward()
    assert x.grad.shape == (0, 64)
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    q, k = (draw(0, heads, 64).requires_grad_() for heads in (2, 1))
    sum(part.sum() for part in OPS.rope.qk_norm_rotary(q, k, weight, weight, *draw.angles(0, 32), 1e-6)).backward()
    assert (q.grad.shape, k.grad.shape) == ((0, 2, 64), (0, 1, 64))


@pytest.mark.parametrize("asked", [(True, False), (False, True), (True, True)])
def test_gradients_that_are_not_asked_for(device, asked):
    """A frozen weight, or a first layer whose input is no leaf."""
    draw = Random(device, torch.float32)
    x, weight = draw(5, 64), draw(16, 32)
    for part, wanted in zip((x, weight), asked, strict=True):
        part.requires_grad_(wanted)
    OPS.act.silu_and_mul_mm(x, weight, None).sum().backward()
    assert (x.grad is not None, weight.grad is not None) == asked


def test_what_is_kept_for_the_backward_pass(device):
    """Beside weights: of a norm and its product the sum, of SwiGLU and its product the input, which the caller has anyway."""
    draw = Random(device, torch.float32)
    x, residual, norm_weight = (draw(*shape).requires_grad_() for shape in ((7, 32), (7, 32), (32,)))
    up, down = draw(48, 32).requires_grad_(), draw(32, 24).requires_grad_()
    weights, kept = {one.data_ptr() for one in (norm_weight, up, down)}, []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        product, total = OPS.norm.add_rms_norm_mm(x, residual, norm_weight, 1e-6, up, None)
        OPS.act.silu_and_mul_mm(product, down, None)
    assert {one.data_ptr() for one in kept} - weights == {total.data_ptr(), product.data_ptr()}


def test_where_no_gradient_is_asked_for_none_is_prepared(device):
    draw = Random(device, torch.float32)
    x, weight = draw(3, 64).requires_grad_(), draw(64)
    assert OPS.norm.rms_norm(x, weight, 1e-6).requires_grad
    with torch.no_grad():
        assert not OPS.norm.rms_norm(x, weight, 1e-6).requires_grad
    wide = [part.detach().double().requires_grad_() for part in (x, weight)]
    assert OPS.norm.rms_norm(*wide, 1e-6).grad_fn.name() != "_RmsNormBackward", "kernels compute in fp32"


# --- the beam step

BEAM_TESTS = [name for name, _ in beam_tests(OPS.search.beam_step)]


@pytest.mark.parametrize("name", BEAM_TESTS[::5] if INTERPRETED else BEAM_TESTS)
def test_the_beam_step_passes_the_references_tests(backend, name):
    def step(*args):
        arguments = map_arguments(backend.runtime.to_device, dict(enumerate(args)))
        return map_arguments(backend.runtime.to_host, {0: OPS.search.beam_step(*arguments.values())})[0]

    dict(beam_tests(step))[name]()


def test_beams_in_the_order_of_their_scores_keep_their_parents(monkeypatch, device):
    """Many blocks and splits: a wide step equals a plain sort of every candidate."""
    monkeypatch.setattr(beams, "BLOCK", 64)
    generator = torch.Generator().manual_seed(3)
    parents, fan = 40, 7
    node = torch.randperm(parents, generator=generator)[:20][None] + 1
    first = torch.tensor([1, *(1 + parents + fan * i for i in range(parents + 1))])
    code = torch.tensor([-1, *range(parents), *(list(range(fan)) * parents)])
    score = torch.randn(1, 20, generator=generator).sort(descending=True).values
    logits = torch.randn(1, 20, fan, generator=generator)
    total = (score[..., None] + logits).flatten()
    order = total.argsort(descending=True)[:30]
    to = lambda x: x.to(device)  # noqa: E731
    found = OPS.search.beam_step(
        to(logits), to(torch.zeros(1, 20)), Beams(to(score), to(node), to(node)), TrieArrays(to(first), to(code)), None,
        to(torch.tensor([30])), 32,
    )  # fmt: skip
    assert torch.equal(found.score[0, :30].cpu(), total[order])
    assert torch.equal(found.parent[0, :30].cpu(), order // fan)
    assert torch.equal(found.node[0, :30].cpu(), first[node[0, order // fan]] + order % fan)
    assert (found.score[0, 30:] == float("-inf")).all()


# Of a step: requests, beams, children of a beam at most, width; candidates of a block, values of a tile, splits at most.
STEPS = {
    "one list": (2, 3, 9, 5, 512, 4096, 128),
    "fewer candidates than are kept": (1, 2, 4, 100, 64, 4096, 128),
    "one tile, a width that is no power of two": (2, 20, 30, 50, 64, 4096, 128),
    "more splits than blocks": (3, 30, 3, 33, 64, 128, 128),
    "several blocks a split": (1, 40, 40, 20, 64, 4096, 3),
    "two stages": (2, 30, 60, 33, 64, 256, 128),
    "two stages, several tiles a program": (1, 40, 60, 64, 64, 64, 17),
    "lists as long as blocks": (1, 30, 40, 256, 64, 1024, 128),
    "many requests": (9, 12, 30, 40, 64, 512, 128),
}


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_lists_of_candidates_become_one(device, name, filtered, monkeypatch):
    """Beams that died, beams without children, equal scores."""
    requests, num_beams, fan, width, block, tile, splits = STEPS[name]
    for constant, value in (("BLOCK", block), ("TILE", tile), ("MAX_SPLITS", splits), ("ENOUGH_SPLITS", 1000)):
        monkeypatch.setattr(beams, constant, value)
    monkeypatch.setattr(beams, "PROGRAMS", 64)
    monkeypatch.setattr(beams, "KEPT_VALUES", 1 << 12)
    generator = torch.Generator().manual_seed(len(name))
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    chosen = lambda size, count: torch.randperm(size, generator=generator)[:count]  # noqa: E731
    parents = num_beams + 9
    count = torch.randint(0, fan + 1, (parents,), generator=generator)
    first = torch.cat((torch.tensor([1]), 1 + parents + torch.tensor([0, *count.cumsum(0).tolist()])))
    codes = [chosen(fan, number).sort().values for number in count.tolist()]
    code = torch.cat((torch.tensor([-1]), torch.arange(parents), *codes))
    score = (draw(requests, num_beams) * 8).round() / 8
    score[draw(requests, num_beams) > 1] = float("-inf")
    score[0] = score[0].clamp_min(-9)  # this request's are all alive, and the last one has a single beam
    score[1:][-1:, 1:] = float("-inf")
    node = 1 + torch.stack([chosen(parents, num_beams) for _ in range(requests)])
    node_filter = None
    if filtered:
        counts = [0 if request % 3 == 2 else len(code) // (2 + request) for request in range(requests)]
        listed = [chosen(len(code), number).sort().values for number in counts]
        stale = chosen(len(code), 5)
        node_filter = NodeFilter(
            torch.cat((*listed, stale)), torch.tensor(counts).cumsum(0), (torch.arange(requests) + 1) % 2
        )
    arguments = {
        "logits": (draw(requests, num_beams, fan) * 8).round() / 8,
        "normalizer": draw(requests, num_beams).round(),
        "beams": Beams(score, node, torch.zeros_like(node)),
        "trie": TrieArrays(first, code),
        "node_filter": node_filter,
        "widths": torch.tensor([width, *torch.randint(1, width + 1, (requests - 1,), generator=generator).tolist()]),
        "width": width,
    }
    found = OPS.search.beam_step(**map_arguments(lambda tensor: tensor.to(device), arguments))
    same(found, reference_search.beam_step(**arguments))


def test_a_step_without_any_candidate(device):
    """Its lists were never written."""
    dead = torch.full((2, 5), float("-inf"), device=device)
    node = torch.zeros(2, 5, dtype=torch.int64, device=device)
    first, code = torch.tensor([1, 4], device=device), torch.tensor([-1, 0, 1, 2], device=device)
    found = OPS.search.beam_step(
        torch.zeros(2, 5, 3, device=device), dead, Beams(dead, node, node), TrieArrays(first, code), None,
        torch.tensor([40, 1], device=device), 40,
    )  # fmt: skip
    zero = torch.zeros(2, 40, dtype=torch.int64)
    same(found, Beams(torch.full((2, 40), float("-inf")), zero, zero))


@pytest.mark.parametrize("width", [1, 32, 50, 256, 300, 512, 1000, 4096])
def test_every_list_is_merged_once(width, monkeypatch):
    """In one stage or two; and a thread never holds more than 32 values."""
    monkeypatch.setattr(beams, "BLOCK", 512)
    for requests, candidates in product((1, 3, 8, 32, 5000), (1, 511, 8192, 50 * 8192, 4096 * 8192)):
        plan = beams.plan_lists(requests, candidates, width)
        assert width <= plan.keep <= plan.block
        assert 1 <= plan.splits <= beams.MAX_SPLITS
        assert (plan.groups or plan.splits) <= plan.direct
        if plan.groups:
            assert (plan.groups - 1) * plan.share < plan.splits <= plan.groups * plan.share
        for values, warps in (
            (plan.at_once * plan.keep, beams.warps_of(plan.keep)), (plan.block, beams.warps_of(plan.block)),
        ):  # fmt: skip
            shape = beams.shape_of(values, plan.keep, warps)
            assert shape["HELD"] <= 5
            assert 5 <= shape["KEEP_LOG"] <= shape["LOG"] <= 12
            assert shape["KEEP_HELD"] == min(shape["HELD"], shape["KEEP_LOG"] - 5)


# --- what stands around the layers


@pytest.mark.parametrize(("rows", "half", "theta"), [(1, 5, 1e4), (9, 64, 1e6), (300, 3, 1e4)])
def test_angles_of_far_positions(device, rows, half, theta):
    """From the product as fp32 rounds it, and as exact as fp32 holds a cosine."""
    rng = np.random.default_rng(rows)
    positions = np.append(rng.integers(0, 1 << 21, rows - 1), 4095)
    frequency = (theta ** -(np.arange(half) / half)).astype(np.float32)
    found = OPS.rope.angles(torch.from_numpy(positions).to(device), torch.from_numpy(frequency).to(device))
    angle = (positions[:, None] * frequency.astype(np.float64)).astype(np.float32).astype(np.float64)
    for one, expected in zip(found, (np.cos(angle), np.sin(angle)), strict=True):
        assert one.dtype == torch.float32
        np.testing.assert_allclose(exact(one), expected, rtol=0, atol=3e-7)


def test_angles_of_no_rows(device):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert OPS.rope.angles(none, torch.ones(4, device=device))[0].shape == (0, 4)


def same(found, expected):
    for name, wanted in vars(expected).items():
        one = getattr(found, name)
        assert (one.dtype, one.shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(one.cpu(), wanted), name


@pytest.mark.parametrize("block", [4, 256])
@pytest.mark.parametrize("seed", range(12 if INTERPRETED else 60))
def test_rows_are_located_as_by_the_reference(device, seed, block, monkeypatch):
    """Places without a sequence anywhere; blocks shorter than the list of sequences and than a sequence; views of rows."""
    module = importlib.import_module(PACKAGE + "kv")
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "MOST_SPLITS", 2)
    rng = np.random.default_rng(seed)
    requests, size = int(rng.integers(1, 12)), int(rng.choice([1, 3, 4, 16]))
    lengths = torch.from_numpy(rng.integers(0, 30, requests) * (rng.random(requests) < 0.7))
    if seed == 0:
        lengths.zero_()
    cached = torch.from_numpy(rng.integers(0, 20, requests)) if seed % 2 else None
    columns = -(-50 // size)
    pages = torch.from_numpy(rng.permutation(requests * columns).reshape(requests, columns).astype(np.int32)) + 1
    num_tokens = int(lengths.sum()) + int(rng.integers(0, 3) * rng.integers(0, 20))
    heads = torch.stack((lengths, lengths + 1)).to(device)[0]
    wide = torch.cat((pages, pages), 1).to(device)[:, :columns]
    moved = None if cached is None else cached.to(device)
    expected = reference_kv.locate(lengths, cached, pages, size, num_tokens)
    same(OPS.kv.locate(heads, moved, wide, size, num_tokens), expected)
    turned = pages.t().contiguous().to(device).t()
    same(OPS.kv.locate(heads, moved, turned, size, num_tokens), expected)
    expected = reference_kv.locate(lengths, cached, None, 1, num_tokens)
    same(OPS.kv.locate(heads, moved, None, 1, num_tokens), expected)


@pytest.mark.parametrize("seed", range(8 if INTERPRETED else 40))
def test_a_pass_runs_what_the_reference_says(device, seed):
    """Three passes over beams of changing width, dead ones among them, more than one program's."""
    rng = np.random.default_rng(seed)
    requests, nodes, old_width, ancestors = int(rng.integers(1, 9)), 50, 1, None
    code = torch.tensor([-1, *rng.integers(0, 9, nodes).tolist()])
    lengths = torch.from_numpy(rng.integers(1, 5000, requests))
    to = lambda x: x.to(device)  # noqa: E731
    for level in range(4):
        width = int(rng.integers(1, 60))
        node = torch.from_numpy(rng.integers(0, nodes + 1, (requests, width)))
        parent = torch.from_numpy(rng.integers(0, old_width, (requests, width))) * (node > 0)
        beams = Beams(torch.zeros(requests, width), node, parent)
        expected = reference_search.next_rows(beams, ancestors, code, lengths, 7 + 16 * level)
        found = OPS.search.next_rows(
            Beams(to(beams.score), to(node), to(parent)), None if ancestors is None else to(ancestors), to(code),
            to(lengths), 7 + 16 * level,
        )  # fmt: skip
        same(found, expected)
        ancestors, old_width = expected.ancestors, width
