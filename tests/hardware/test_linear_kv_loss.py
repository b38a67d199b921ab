"""Matrix products (the reference and the CPU's own), the write into the cache, and the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from e4m3 import decode, nearest

from polyrec.hardware.backends.cpu.ops import linear as cpu_linear
from polyrec.hardware.ops import REFERENCE_OPS


@pytest.fixture(params=["reference", "onednn"])
def mm(request):
    if request.param == "reference":
        return REFERENCE_OPS.linear.mm
    if not cpu_linear.has_onednn_mm():
        pytest.skip("this torch has no oneDNN product")
    return cpu_linear.onednn_mm


def draw(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# The last three reach the number of rows from which the CPU leaves the reference, evenly and with a rest.
@pytest.mark.parametrize("shape", [(1, 3, 2), (5, 16, 9), (0, 8, 8), (512, 96, 100), (513, 128, 64), (1100, 40, 30)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_product_and_gradients(mm, shape, bias, strided):
    rows, inputs, outputs = shape
    x, weight = draw(rows, inputs, seed=0), draw(outputs, inputs, seed=1)
    if strided:
        x, weight = draw(inputs, rows, seed=0).T, draw(outputs, 3 * inputs, seed=1)[:, ::3]
    offset = draw(outputs, seed=2) if bias else None
    expected = x.double().numpy() @ weight.double().numpy().T + (offset.double().numpy() if bias else 0)
    with torch.inference_mode():
        found = mm(x, weight, offset)
        np.testing.assert_allclose(found.numpy(), expected, atol=3e-5 * max(inputs, 1) ** 0.5)

    leaves = [part.detach().requires_grad_() for part in (x, weight, offset) if part is not None]
    grad = draw(rows, outputs, seed=3)
    out = mm(*leaves, *([] if bias else [None]))
    torch.testing.assert_close(out.detach(), found, rtol=1e-4, atol=1e-4)
    out.backward(grad)
    grad64 = grad.double().numpy()
    wanted = [grad64 @ weight.double().numpy(), grad64.T @ x.double().numpy(), grad64.sum(0)]
    for leaf, want in zip(leaves, wanted, strict=False):
        np.testing.assert_allclose(leaf.grad.numpy(), want, atol=3e-5 * max(rows, outputs) ** 0.5)


def test_product_of_a_batch_of_matrices(mm):
    x, weight = draw(2, 270, 128, seed=4), draw(96, 128, seed=5)
    found = mm(x, weight, None)
    assert found.shape == (2, 270, 96)
    np.testing.assert_allclose(found.numpy(), x.double().numpy() @ weight.double().numpy().T, atol=3e-4)


@pytest.mark.parametrize("trained", ["x", "weight", "nothing"])
def test_only_what_is_trained_gets_a_gradient(mm, trained):
    x, weight = draw(100, 128, seed=6), draw(128, 128, seed=7)
    if trained != "nothing":
        {"x": x, "weight": weight}[trained].requires_grad_()
    out = mm(x, weight, None)
    assert out.requires_grad == (trained != "nothing")
    if trained != "nothing":
        out.sum().backward()
        assert (x.grad is None) == (trained == "weight")
        assert (weight.grad is None) == (trained == "x")


def test_product_keeps_dtype_and_follows_autocast(mm):
    for dtype in (torch.float64, torch.bfloat16):
        assert mm(draw(100, 128, seed=8, dtype=dtype), draw(128, 128, seed=9, dtype=dtype), None).dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mm(draw(100, 128, seed=8), draw(128, 128, seed=9), None).dtype == torch.bfloat16


def test_onednn_is_for_wide_cpus_of_another_maker(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    (tmp_path / "amd").write_text("vendor_id\t: AuthenticAMD\n")
    (tmp_path / "intel").write_text("vendor_id\t: GenuineIntel\n")
    assert cpu_linear.mkl_is_narrow(tmp_path / "amd")
    assert not cpu_linear.mkl_is_narrow(tmp_path / "intel")
    assert not cpu_linear.mkl_is_narrow(tmp_path / "absent")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not cpu_linear.mkl_is_narrow(tmp_path / "amd")


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (6, 40), (2, 3, 16)])
def test_quantised_rows(shape, strided):
    x = draw(*shape[:-1], shape[-1] * (3 if strided else 1), seed=20)[..., :: 3 if strided else 1] * 7
    x[..., 0] *= 30  # a row's other values become small numbers of e4m3
    quantized, scale = REFERENCE_OPS.linear.quantize_fp8(x)
    wanted = np.abs(x.numpy()).max(-1, keepdims=True) / np.float32(448)
    np.testing.assert_array_equal(scale.numpy(), wanted)
    np.testing.assert_array_equal(decode(quantized), nearest(x.numpy() / wanted))


@pytest.mark.parametrize("largest", [0.0, 1e-42, 1e-38, 3e38])
def test_quantising_the_ends_of_the_range(largest):
    x = torch.tensor([[0.0, largest, -largest / 2]])
    quantized, scale = REFERENCE_OPS.linear.quantize_fp8(x)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    found = decode(quantized) * scale.double().numpy()
    np.testing.assert_allclose(found, x.double().numpy(), rtol=1 / 16, atol=torch.finfo(torch.float32).tiny / 512)


def test_quantised_blocks_are_quantised_rows_of_128():
    x = draw(3, 384, seed=21)
    x[1, 128:256] = 0
    x[2, 256:] *= 1000
    quantized, scale = REFERENCE_OPS.linear.quantize_fp8_blocks(x)
    assert (quantized.shape, scale.shape) == (x.shape, (3, 3))
    for row in range(3):
        for block in range(3):
            part = x[row, 128 * block : 128 * block + 128].numpy()
            own = max(np.abs(part).max() / np.float32(448), np.finfo(np.float32).tiny)
            assert scale[row, block] == own
            np.testing.assert_array_equal(decode(quantized[row])[128 * block : 128 * block + 128], nearest(part / own))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 16, 16), (9, 64, 48), (0, 16, 16)])
def test_scaled_product(rows, inputs, outputs, bias, out_dtype):
    q, weight = (draw(count, inputs, seed=22 + count).to(torch.float8_e4m3fn) for count in (rows, outputs))
    q_scale, weight_scale = draw(rows, 1, seed=23).abs(), draw(outputs, 1, seed=24).abs()
    offset = draw(outputs, seed=25, dtype=out_dtype) if bias else None
    wide = decode(q) * q_scale.numpy() @ (decode(weight) * weight_scale.numpy()).T
    wide = wide + (offset.double().numpy() if bias else 0)
    found = REFERENCE_OPS.linear.scaled_mm(q, q_scale, weight, weight_scale, offset, out_dtype)
    assert found.dtype == out_dtype
    limit = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[out_dtype]
    np.testing.assert_allclose(found.double().numpy(), wide, rtol=limit, atol=limit)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 128, 1), (5, 384, 200), (3, 256, 256)])
def test_block_scaled_product(rows, inputs, outputs, out_dtype):
    q, weight = (draw(count, inputs, seed=26 + count).to(torch.float8_e4m3fn) for count in (rows, outputs))
    q_scale = draw(rows, inputs // 128, seed=27).abs() / 8
    weight_scale = draw(-(-outputs // 128), inputs // 128, seed=28).abs()
    expected = np.zeros((rows, outputs))
    for column in range(outputs):
        for block in range(inputs // 128):
            part = slice(128 * block, 128 * block + 128)
            product = decode(q)[:, part] @ decode(weight)[column, part]
            expected[:, column] += product * q_scale[:, block].numpy() * float(weight_scale[column // 128, block])
    found = REFERENCE_OPS.linear.block_scaled_mm(q, q_scale, weight, weight_scale, out_dtype)
    assert found.dtype == out_dtype
    limit = 2e-5 if out_dtype == torch.float32 else 8e-3
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=limit, atol=limit)


def test_quantised_product_approximates_the_product():
    x, weight = draw(8, 256, seed=29), draw(32, 256, seed=30) / 16
    linear = REFERENCE_OPS.linear
    rows = linear.scaled_mm(*linear.quantize_fp8(x), *linear.quantize_fp8(weight), None, torch.float32)
    exact = x.double().numpy() @ weight.double().numpy().T
    error = np.sqrt(((rows.double().numpy() - exact) ** 2).mean() / (exact**2).mean())
    assert 0.01 < error < 0.06  # e4m3 keeps 3 bits: about 3 % of each factor, at random


@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 5], [2], [0, 0]])
def test_grouped_product_and_gradients(sizes):
    rows = sum(sizes)
    x, weight = draw(rows, 6, seed=31).requires_grad_(), draw(len(sizes), 5, 6, seed=32).requires_grad_()
    group = [number for number, size in enumerate(sizes) for _ in range(size)]
    found = REFERENCE_OPS.linear.grouped_mm(x, weight, torch.tensor(sizes))
    x64, weight64 = x.detach().double().numpy(), weight.detach().double().numpy()
    assert found.shape == (rows, 5)
    expected = np.array([weight64[own] @ x64[row] for row, own in enumerate(group)]).reshape(rows, 5)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-5)
    grad = draw(rows, 5, seed=33)
    found.backward(grad)
    wanted_x, wanted_weight = np.zeros_like(x64), np.zeros_like(weight64)
    for row, own in enumerate(group):
        wanted_x[row] = grad[row].double().numpy() @ weight64[own]
        wanted_weight[own] += np.outer(grad[row].double().numpy(), x64[row])
    np.testing.assert_allclose(x.grad.numpy(), wanted_x, atol=1e-5)
    np.testing.assert_allclose(weight.grad.numpy(), wanted_weight, atol=1e-5)


def test_copied_pages():
    page_size, pages = 4, 6
    keys, values = draw(pages * page_size, 2, 3, seed=34), draw(pages * page_size, 2, 3, seed=35)
    source, target = [0, 3, 3, 1], [3, 0, 5, 2]  # 0 and 3 change places, 3 is copied twice
    expected = [cache.clone() for cache in (keys, values)]
    for old, new in zip(source, target, strict=True):
        for row in range(page_size):
            for cache, wanted in zip((keys, values), expected, strict=True):
                wanted[new * page_size + row] = cache[old * page_size + row]
    REFERENCE_OPS.kv.copy_pages(keys, values, torch.tensor(source), torch.tensor(target), page_size)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_kv_write_touches_its_slots_only():
    keys, values = draw(20, 2, 4, seed=10), draw(20, 2, 4, seed=11)
    fused = draw(5, 16, seed=12)  # new keys and values are views of one product
    key, value = (part.unflatten(-1, (2, 4)) for part in fused.split(8, dim=-1))
    slots = torch.tensor([19, 3, 0, 11, 4])
    expected_keys, expected_values = keys.clone(), values.clone()
    for row, slot in enumerate(slots.tolist()):
        expected_keys[slot], expected_values[slot] = key[row], value[row]
    REFERENCE_OPS.kv.write(key, value, keys, values, slots)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)


@pytest.mark.parametrize("scale", [1.0, 400.0])
def test_kv_write_into_e4m3_pages_saturates(scale):
    """The nearest e4m3 number, and ±448 for what is larger: torch's own conversion makes that a NaN."""
    keys, values = (torch.zeros(9, 2, 4).to(torch.float8_e4m3fn) for _ in range(2))
    key, value = draw(3, 2, 4, seed=20) * scale, draw(3, 2, 4, seed=21) * scale
    slots = torch.tensor([7, 0, 4])
    REFERENCE_OPS.kv.write(key, value, keys, values, slots)
    for cache, rows in ((keys, key), (values, value)):
        expected = np.zeros((9, 2, 4))
        expected[slots] = nearest(rows.double().clamp(-448, 448))
        np.testing.assert_array_equal(decode(cache), expected)


@pytest.mark.parametrize("rows", [1, 17])
def test_linear_cross_entropy(rows):
    hidden, weight = draw(rows, 12, seed=13), draw(30, 12, seed=14)
    targets = torch.randint(0, 30, (rows,), generator=torch.Generator().manual_seed(15))
    logits = hidden.double().numpy() @ weight.double().numpy().T
    expected = np.logaddexp.reduce(logits, axis=1) - logits[np.arange(rows), targets]
    found = REFERENCE_OPS.loss.linear_cross_entropy(hidden, weight, targets)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_linear_cross_entropy_of_half_precision_is_summed_in_fp32():
    hidden, weight = draw(6, 8, seed=16, dtype=torch.bfloat16) * 8, draw(50, 8, seed=17, dtype=torch.bfloat16)
    targets = torch.arange(6)
    found = REFERENCE_OPS.loss.linear_cross_entropy(hidden, weight, targets)
    logits = (hidden @ weight.T).double().numpy()  # the product itself rounds to bf16
    np.testing.assert_allclose(found.numpy(), np.logaddexp.reduce(logits, 1) - logits[np.arange(6), targets], atol=1e-4)


def test_linear_cross_entropy_gradients():
    hidden, weight = draw(5, 4, seed=18).requires_grad_(), draw(7, 4, seed=19).requires_grad_()
    targets = torch.tensor([0, 6, 3, 3, 1])
    REFERENCE_OPS.loss.linear_cross_entropy(hidden, weight, targets).sum().backward()
    h, w = hidden.detach().double().numpy(), weight.detach().double().numpy()
    share = np.exp(h @ w.T - np.logaddexp.reduce(h @ w.T, axis=1)[:, None]) - np.eye(7)[targets]
    np.testing.assert_allclose(hidden.grad.numpy(), share @ w, atol=1e-5)
    np.testing.assert_allclose(weight.grad.numpy(), share.T @ h, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 17])
def test_token_logp(rows):
    hidden, weight = draw(rows, 12, seed=36).requires_grad_(), draw(30, 12, seed=37).requires_grad_()
    targets = torch.randint(0, 30, (rows,), generator=torch.Generator().manual_seed(38))
    h, w = hidden.detach().double().numpy(), weight.detach().double().numpy()
    logp = h @ w.T - np.logaddexp.reduce(h @ w.T, axis=1)[:, None]
    found = REFERENCE_OPS.loss.token_logp(hidden, weight, targets)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.detach().numpy(), logp[np.arange(rows), targets], atol=1e-5)
    found.sum().backward()
    share = np.eye(30)[targets] - np.exp(logp)
    np.testing.assert_allclose(hidden.grad.numpy(), share @ w, atol=1e-5)
    np.testing.assert_allclose(weight.grad.numpy(), share.T @ h, atol=1e-5)
