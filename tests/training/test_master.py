"""AdamW over bf16 weights follows AdamW over fp32 ones; nothing of a weight is lost, and a saved state goes on bit for bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from polyrec.training import master
from polyrec.training.master import MasterAdamW, join, split, update


def test_joining_what_was_split_gives_every_bit_back():
    rng = np.random.default_rng(0)
    bits = rng.integers(-(2**31), 2**31, 200_000, dtype=np.int64).astype(np.int32)
    edges = [0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x00000001, 0x7F7F7FFF, -0x80000000, -1 - 0x40000000]
    values = torch.from_numpy(np.concatenate([bits, np.array(edges, np.int32)])).view(torch.float32)
    values = values[values.isfinite() & (values.abs() < 3e38)]
    upper, rest = split(values)
    assert torch.equal(join(upper, rest).view(torch.int32), values.view(torch.int32))
    nearest = upper.view(torch.bfloat16).double()
    step = (values.to(torch.bfloat16).double() - values.double()).abs()
    assert ((nearest - values.double()).abs() <= step).all(), "no bf16 number is nearer"


def draw(seed, *shapes, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in shapes]


SHAPES = [(40, 16), (16,), (7, 3), (33,)]


@pytest.mark.parametrize(
    ("bucket", "alone", "expected"),
    [
        (10**9, 10**9, [[0, 1, 2, 3, 4]]),
        (10**9, 20, [[1], [3], [0, 2, 4]]),
        (13, 20, [[1], [3], [0, 2], [4]]),
        (1, 1, [[0], [1], [2], [3], [4]]),
    ],
)
def test_large_parameters_are_updated_by_themselves(monkeypatch, bucket, alone, expected):
    monkeypatch.setattr(master, "BUCKET", bucket)
    monkeypatch.setattr(master, "ALONE", alone)
    parameters = [torch.zeros(size, dtype=torch.bfloat16) for size in (9, 25, 4, 20, 3)]
    number = {id(one): place for place, one in enumerate(parameters)}
    assert [[number[id(one)] for one in found] for found in master.in_buckets(parameters)] == expected


def groups_of(parameters):
    return [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]


def make(step_function=update, **settings):
    weights = [torch.nn.Parameter(one.to(torch.bfloat16)) for one in draw(0, *SHAPES)]
    options = {"lr": 1e-4, "betas": (0.9, 0.99), **settings}
    return weights, MasterAdamW(groups_of(weights), step_function=step_function, **options)


@pytest.mark.parametrize(("bucket", "alone"), [(1, 10**9), (600, 10**9), (10**9, 10**9), (10**9, 100)])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_masters_follow_torchs_adamw(monkeypatch, bucket, alone, scale):
    """200 steps, of which each alone would be lost in bf16."""
    monkeypatch.setattr(master, "BUCKET", bucket)
    monkeypatch.setattr(master, "ALONE", alone)
    weights, optimizer = make()
    exact = [torch.nn.Parameter(one.detach().float()) for one in weights]
    reference = torch.optim.AdamW(groups_of(exact), lr=1e-4, betas=(0.9, 0.99))
    began = [one.detach().clone() for one in exact]
    for step in range(200):
        slopes = [one.to(torch.bfloat16) for one in draw(step % 7 + 1, *SHAPES)]
        for one, other, slope in zip(weights, exact, slopes, strict=True):
            one.grad, other.grad = slope, slope.float() * scale
        optimizer.gradient_scale = scale
        optimizer.step()
        reference.step()
    masters = optimizer.masters()
    for one, other, before in zip(weights, exact, began, strict=True):
        moved = torch.linalg.vector_norm(other - before)
        assert moved > 0.05 * len(other) ** 0.5 * 1e-2
        assert torch.linalg.vector_norm(masters[one] - other) < 0.01 * moved  # first moments are rounded to bf16
        assert torch.equal(one, split(masters[one])[0].view(torch.bfloat16)), "weights are their masters, rounded"
        assert one.shape == other.shape


def test_rows_are_seen_where_numbers_make_whole_ones(monkeypatch):
    """And nothing else comes of it."""
    monkeypatch.setattr(master, "ALONE", 10**9)
    monkeypatch.setattr(master, "BUCKET", 1)  # each parameter by itself
    shapes, found = [], []

    def seen(*tensors):
        shapes.append([tuple(one.shape) for one in tensors])
        update(*tensors)

    for row in (1, 4, 10**6):
        monkeypatch.setattr(master, "ROW", row)
        weights, optimizer = make(seen)
        for one, slope in zip(weights, draw(1, *SHAPES), strict=True):
            one.grad = slope.to(torch.bfloat16)
        shapes.clear()
        optimizer.step()
        sizes = sorted(one.numel() for one in weights)
        expected = sorted((size,) if size % row else (size // row, row) for size in sizes)
        assert sorted(each[0] for each in shapes) == expected
        assert all(each == [each[0]] * 5 + [(8,)] for each in shapes)
        found.append([one.detach().clone() for one in weights])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def test_a_saved_state_goes_on_bit_for_bit():
    def run(optimizer, weights, steps):
        for step in steps:
            for one, slope in zip(weights, draw(step, *SHAPES), strict=True):
                one.grad = slope.to(torch.bfloat16)
            optimizer.step()

    weights, optimizer = make()
    run(optimizer, weights, range(3))
    saved, values = copy.deepcopy(optimizer.state_dict()), [one.detach().clone() for one in weights]
    run(optimizer, weights, range(3, 6))
    others, resumed = make()
    with torch.no_grad():
        for one, value in zip(others, values, strict=True):
            one.copy_(value)
    resumed.load_state_dict(saved)
    run(resumed, others, range(3, 6))
    for one, other in zip(weights, others, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizer.masters()[one], resumed.masters()[other])


def test_a_missing_gradient_counts_as_zero():
    (first, second, third, fourth), optimizer = make(lr=0.1)
    before = [one.detach().clone() for one in (first, second, third, fourth)]
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert not torch.equal(first, before[0])
    assert torch.equal(second, before[1])
    assert torch.equal(fourth, before[3]), "norms and biases do not decay"
    torch.testing.assert_close(third.float(), before[2].float() * 0.99, rtol=0.01, atol=0.0)


def test_fp32_parameters_are_refused():
    with pytest.raises(AssertionError, match="needs no master"):
        MasterAdamW([{"params": [torch.nn.Parameter(torch.ones(3))]}], lr=0.1, betas=(0.9, 0.99))


@pytest.mark.parametrize("alone", [10**9, 100, 1])
@pytest.mark.parametrize("row", [1, 4, 10**6])
def test_averages_follow_the_masters(monkeypatch, alone, row):
    """However parameters stand together; the first time they become the masters themselves."""
    monkeypatch.setattr(master, "ALONE", alone)
    monkeypatch.setattr(master, "ROW", row)
    asked = []

    def seen(*tensors):
        asked.append([tuple(one.shape) for one in tensors])
        master.approach(*tensors)

    weights, optimizer = make(average_function=seen)
    averages = {one: torch.nn.Parameter(torch.full(one.shape, 7.0)) for one in weights}  # as a model has them
    expected = {one: average.detach().double() for one, average in averages.items()}
    for share in (1.0, 0.9, 0.25, 0.01):
        for one, slope in zip(weights, draw(1, *SHAPES), strict=True):
            one.grad = slope.to(torch.bfloat16)
        optimizer.step()
        optimizer.average_into(averages, share)
        for one, value in optimizer.masters().items():
            expected[one] += share * (value.double() - expected[one])
            if share == 1:
                assert torch.equal(averages[one], value)
            torch.testing.assert_close(averages[one].detach().double(), expected[one], rtol=1e-6, atol=1e-6)
    assert len(asked) == 4 * sum(len(one.parameters) == 1 for one in optimizer._buckets)
    assert all(sizes[0] == sizes[1] == sizes[2] and sizes[3] == () for sizes in asked)


@pytest.mark.parametrize("function", [update, master.approach], ids=["update", "approach"])
def test_what_is_compiled_can_be_traced_whole(function):
    """Without the code generator, which needs a C++ compiler here."""
    torch.compiler.reset()
    values = [value.flatten() for value in draw(3, (8, 16), (8, 16), (8, 16))]
    upper, rest = split(values[0])
    if function is update:
        numbers = torch.tensor([1e-3, 0.1, 0.9, 0.99, 1e-8, 0.1, 0.01, 1.0])
        tensors = [upper, rest, values[1].to(torch.bfloat16), values[2].to(torch.bfloat16), values[1].square(), numbers]
    else:
        tensors = [values[1], upper, rest, torch.tensor(0.3)]
    found, expected = copy.deepcopy(tensors), copy.deepcopy(tensors)
    torch.compile(function, backend="aot_eager", fullgraph=True)(*found)
    function(*expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
