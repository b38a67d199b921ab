"""A tied weight's gradient is what autograd makes of two uses, and is made in the place of the head's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import embedding
from torch.utils._python_dispatch import TorchDispatchMode

from polyrec.layers.embedding import embed_tied, sum_repeated

VOCAB, DIM = 400, 24
CPU, DEVICE = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device that torch shows as cuda"),
        ],
    ),
)


def plain(weight, token_ids):
    return embedding(token_ids, weight), weight


def whole(hidden, weight):
    return (hidden @ weight.T).square().mean()


def part(hidden, weight):
    return (hidden @ weight[30:70].T).square().mean()


def both(hidden, weight):
    return whole(hidden, weight) + part(hidden, weight)


def expanded(hidden, weight):
    """Its gradient of the weight is one number, seen in every place."""
    return weight.sum() + hidden.square().sum()


def without_head(hidden, weight):
    return hidden.square().sum()


def head_alone(hidden, weight):
    return whole(torch.ones(3, DIM, dtype=weight.dtype, device=weight.device), weight)


HEADS = [whole, part, both, expanded, without_head, head_alone]
# Of 300 tokens: hardly any twice, four times each, nearly all one token, all the last one.
TOKENS = {
    "few repeated": torch.randint(0, VOCAB, (300,), generator=torch.Generator().manual_seed(0)),
    "repeated": torch.randint(100, 175, (300,), generator=torch.Generator().manual_seed(1)),
    "one mostly": torch.where(torch.arange(300) % 50 == 3, torch.arange(300), 7),
    "the last": torch.full((300,), VOCAB - 1),
    "one": torch.tensor([5]),
    "none": torch.tensor([], dtype=torch.int64),
}


def drawn(dtype, device="cpu", vocab=VOCAB, dim=DIM):
    weight, matrix = (
        torch.randn(rows, dim, generator=torch.Generator().manual_seed(rows)).to(device, dtype) for rows in (vocab, dim)
    )
    return weight.requires_grad_(), matrix


def gradient(embed, weight, matrix, token_ids, head):
    weight.grad = None
    rows, same = embed(weight, token_ids)
    head(rows @ matrix, same).backward()
    return weight.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
@pytest.mark.parametrize("tokens", TOKENS)
def test_gradients_equal_autograds(tokens, head, dtype):
    """Bit for bit, so what bf16 rounds is what it rounded before."""
    weight, matrix = drawn(dtype)
    expected = gradient(plain, weight, matrix, TOKENS[tokens], head)
    found = gradient(embed_tied, weight, matrix, TOKENS[tokens], head)
    assert found.is_contiguous()
    assert torch.equal(found, expected)


def test_the_numbers_themselves():
    """Against sums written out in float64."""
    weight, matrix = drawn(torch.float32)
    tokens = TOKENS["repeated"]
    found = gradient(embed_tied, weight, matrix, tokens, whole)
    w, m = weight.detach().double(), matrix.double()
    hidden = w[tokens] @ m
    slope = 2 * hidden @ w.T / (len(tokens) * VOCAB)
    expected = slope.T @ hidden
    for token, row in zip(tokens.tolist(), slope @ w @ m.T, strict=True):
        expected[token] += row
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", [CPU, DEVICE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(VOCAB, DIM, 300), (20_000, 256, 16_384)], ids=str)
@pytest.mark.parametrize("repeated", [1, 4, 10**6])
def test_as_exact_as_autograd_and_always_the_same(device, dtype, shape, repeated):
    vocab, dim, count = shape
    weight, matrix = drawn(dtype, device, vocab, dim)
    generator = torch.Generator().manual_seed(2)
    tokens = (torch.randint(0, vocab, (count,), generator=generator) // repeated).to(device)

    def head(hidden, same):
        """The last tokens' logits, so that the reference in float64 stays small."""
        return hidden.sum() + (hidden[-40:] @ same.T).square().mean()

    exact = gradient(plain, weight.detach().double().requires_grad_(), matrix.double(), tokens, head)

    def error(found):
        return torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact)

    before, *found = (gradient(embed, weight, matrix, tokens, head) for embed in (plain, embed_tied, embed_tied))
    assert torch.equal(*found)
    assert error(found[0]) <= error(before) * 1.001 + torch.finfo(dtype).eps * 1e-2


@pytest.mark.parametrize("tokens", TOKENS)
def test_each_token_has_one_place_with_its_sum(tokens):
    ids = TOKENS[tokens]
    rows = torch.randn(len(ids), DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    places, sums = sum_repeated(ids, rows, VOCAB)
    holding = sums.any(1)
    assert sorted(places[holding].tolist()) == sorted(set(ids.tolist()))
    assert places[~holding].unique().numel() == (~holding).sum(), "zeros wait for nobody"
    expected = torch.zeros(VOCAB, DIM, dtype=torch.float64).index_add_(0, ids, rows)
    torch.testing.assert_close(torch.zeros_like(expected).index_add_(0, places, sums), expected)


class OwnGradient(torch.autograd.Function):
    """Makes the weight's gradient in the forward pass, as the loss in blocks does."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(torch.ones_like(hidden), torch.ones_like(weight))
        return hidden.sum() + weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        by_hidden, by_weight = ctx.saved_tensors
        OwnGradient.place = by_weight.data_ptr()
        return by_hidden, by_weight


def test_the_gradient_stays_where_the_head_made_it():
    weight, matrix = drawn(torch.bfloat16)
    found = gradient(embed_tied, weight, matrix, TOKENS["repeated"], OwnGradient.apply)
    assert found.data_ptr() == OwnGradient.place


class LargeResults(TorchDispatchMode):
    """Names of torch's operations that gave or wrote a tensor as large as the weight, views left out."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == (VOCAB, DIM) and not function.is_view:
            self.names.append(function.overloadpacket.__name__)
        return result


@pytest.mark.parametrize(
    ("embed", "head", "expected"),
    [
        (plain, whole, ["mm", "embedding_dense_backward", "add"]),
        (embed_tied, whole, ["mm", "index_add_"]),
        (plain, part, ["slice_backward", "embedding_dense_backward", "add"]),
        (embed_tied, part, ["slice_backward", "index_add_"]),
    ],
)
def test_what_is_as_large_as_the_vocabulary_in_the_backward_pass(embed, head, expected):
    """`add` may be in place, but for this mode; it is a pass all the same."""
    weight, matrix = drawn(torch.bfloat16)
    rows, same = embed(weight, TOKENS["repeated"])
    loss = head(rows @ matrix, same)
    with LargeResults() as large:
        loss.backward()
    assert large.names == expected


def test_gradients_of_two_batches_add_up():
    weight, matrix = drawn(torch.float32)
    sums = []
    for embed in (plain, embed_tied):
        weight.grad = None
        for tokens in ("repeated", "few repeated"):
            rows, same = embed(weight, TOKENS[tokens])
            both(rows @ matrix, same).backward()
        sums.append(weight.grad)
    assert torch.equal(*sums)


def test_autograd_is_asked_for_the_gradient_alone():
    weight, matrix = drawn(torch.float64)
    expected = gradient(plain, weight, matrix, TOKENS["repeated"], both)
    rows, same = embed_tied(weight, TOKENS["repeated"])
    assert torch.equal(torch.autograd.grad(both(rows @ matrix, same), weight)[0], expected)


def test_a_second_pass_gives_the_same_again():
    weight, matrix = drawn(torch.float64)
    rows, same = embed_tied(weight, TOKENS["repeated"])
    loss = both(rows @ matrix, same)
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("case", ["no gradient", "frozen", "long batch"])
def test_where_nothing_is_saved_the_weight_passes_as_it_is(case):
    weight, matrix = drawn(torch.float32)
    tokens = TOKENS["repeated"].repeat(2) if case == "long batch" else TOKENS["repeated"]
    weight.requires_grad_(case != "frozen")
    with torch.set_grad_enabled(case != "no gradient"):
        rows, same = embed_tied(weight, tokens)
    assert same is weight
    assert torch.equal(rows, weight[tokens])
    if case == "long batch":
        expected = gradient(plain, weight, matrix, tokens, both)
        assert torch.equal(gradient(embed_tied, weight, matrix, tokens, both), expected)


def test_compiled_as_a_whole():
    """torch's tracing, without the code generator, which needs a C++ compiler here."""
    weight, matrix = drawn(torch.float32)
    expected = gradient(plain, weight, matrix, TOKENS["repeated"], whole)
    compiled = torch.compile(embed_tied, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled, weight, matrix, TOKENS["repeated"], whole), expected)
