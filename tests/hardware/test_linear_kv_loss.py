"""Matrix products (the reference and the CPU's own), the write into the cache, and the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
