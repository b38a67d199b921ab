"""The search's operations against plain Python, exactly: numbers are small multiples of 1/8, so fp32 does not round."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.hardware.ops.search import Beams, NodeFilter, TrieArrays

DEAD = -math.inf


class Tree:
    """A random level of a tree: the root is node 0, `num` nodes below it, each with 0–4 children of increasing codes."""

    def __init__(self, rng, num=6, codes=5):
        fanout = rng.integers(0, codes, size=num)
        self.num_codes = codes
        self.children = {0: list(range(1, num + 1))}
        self.code = [-1, *range(num)]
        for node in range(num):
            start = len(self.code)
            self.children[node + 1] = list(range(start, start + fanout[node]))
            self.code += sorted(rng.choice(codes, fanout[node], replace=False).tolist())
        first = np.cumsum([1, num, *fanout])
        self.arrays = TrieArrays(torch.from_numpy(first), torch.tensor(self.code))


def plain_step(logits, normalizer, beams, tree, filters, widths):
    """beams: per request a list of (score, node). -> per request the kept (score, node, parent), best first."""
    kept = []
    for request, row in enumerate(beams):
        grown = []
        for parent, (score, node) in enumerate(row):
            if score == DEAD:
                continue
            children = [child for child in tree.children[node] if filters is None or filters[request](child)]
            gains = [float(logits[request, parent, tree.code[child]]) for child in children]
            lse = np.logaddexp.reduce(gains or [0.0]) if normalizer is None else float(normalizer[request, parent])
            grown += [(score + (gain - lse), child, parent) for gain, child in zip(gains, children, strict=True)]
        kept.append(sorted(grown, key=lambda beam: (-beam[0], beam[1]))[: widths[request]])
    return kept


def eighths(rng, *shape, low=-12, high=12):
    """Few different values, so ties are everywhere."""
    return torch.from_numpy(rng.integers(low, high + 1, size=shape) / 8).float()


def as_beams(beams):
    score = torch.tensor([[score for score, _ in row] for row in beams], dtype=torch.float32)
    node = torch.tensor([[node for _, node in row] for row in beams])
    return Beams(score, node, torch.zeros_like(node))


def expect(found, kept, width, exact=True):
    assert found.score.dtype == torch.float32
    assert found.node.dtype == found.parent.dtype == torch.int64
    assert found.score.shape == found.node.shape == found.parent.shape == (len(kept), width)
    for row, beams in enumerate(kept):
        scores = [beam[0] for beam in beams] + [DEAD] * (width - len(beams))
        np.testing.assert_allclose(found.score[row].numpy(), scores, atol=0 if exact else 1e-5, rtol=0)
        assert found.node[row, : len(beams)].tolist() == [beam[1] for beam in beams]
        assert found.parent[row, : len(beams)].tolist() == [beam[2] for beam in beams]


def random_beams(rng, requests, width, nodes):
    """Distinct nodes, scores in order, some requests with dead beams at the end (or only dead ones)."""
    beams = []
    for _ in range(requests):
        living = int(rng.integers(0, width + 1)) if rng.random() < 0.5 else width
        scores = sorted((float(rng.integers(-40, 1)) / 8 for _ in range(living)), reverse=True)
        chosen = rng.choice(nodes, living, replace=False).tolist()
        beams.append([*zip(scores, chosen, strict=True), *[(DEAD, 0)] * (width - living)])
    return beams


def random_filter(rng, tree, requests):
    """Some requests allow, some exclude, some do neither; -> the op's argument and the same as predicates."""
    nodes, ends, allow, predicates = [], [], [], []
    for _ in range(requests):
        listed = set(rng.choice(len(tree.code), int(rng.integers(0, len(tree.code))), replace=False).tolist())
        kind = rng.choice(["allow", "exclude", "neither"])
        listed = set() if kind == "neither" else listed
        allow.append(int(kind == "allow"))
        nodes += sorted(listed)
        ends.append(len(nodes))
        predicates.append(
            (lambda child, listed=listed: child in listed)
            if kind == "allow"
            else (lambda child, listed=listed: child not in listed)
        )
    nodes += rng.integers(0, len(tree.code), int(rng.integers(0, 3))).tolist()  # which nobody lists
    return NodeFilter(*(torch.tensor(each, dtype=torch.int64) for each in (nodes, ends, allow))), predicates


@pytest.mark.parametrize("seed", range(40))
def test_a_step_equals_plain_python(seed):
    rng = np.random.default_rng(seed)
    tree = Tree(rng, num=int(rng.integers(1, 9)), codes=int(rng.integers(2, 7)))
    nodes = np.arange(1, len(tree.children))
    requests, width = int(rng.integers(1, 5)), int(rng.integers(1, len(nodes) + 1))
    beams = random_beams(rng, requests, width, nodes)
    logits = eighths(rng, requests, width, tree.num_codes)
    normalizer = eighths(rng, requests, width, low=8, high=24)
    widths = rng.integers(1, 14, size=requests)  # often wider than there are candidates
    node_filter, predicates = random_filter(rng, tree, requests) if rng.random() < 0.6 else (None, None)
    found = REFERENCE_OPS.search.beam_step(
        logits, normalizer, as_beams(beams), tree.arrays, node_filter, torch.from_numpy(widths), int(widths.max())
    )
    expect(found, plain_step(logits, normalizer, beams, tree, predicates, widths), int(widths.max()))


@pytest.mark.parametrize("seed", range(2))
def test_a_wide_step_equals_plain_python(seed):
    """Of some 1,600 candidates, most of them tied with others, 1,000 and 600 are kept: more than one of a kernel's blocks."""
    rng = np.random.default_rng(300 + seed)
    tree = Tree(rng, num=850)
    beams = random_beams(rng, 2, 800, np.arange(1, 851))
    logits, normalizer = eighths(rng, 2, 800, tree.num_codes), eighths(rng, 2, 800, low=8, high=24)
    widths = np.array([1000, 600])
    found = REFERENCE_OPS.search.beam_step(
        logits, normalizer, as_beams(beams), tree.arrays, None, torch.from_numpy(widths), 1000
    )
    expect(found, plain_step(logits, normalizer, beams, tree, None, widths), 1000)


@pytest.mark.parametrize("seed", range(15))
def test_normalised_over_the_valid_children(seed):
    rng = np.random.default_rng(100 + seed)
    tree = Tree(rng)
    beams = random_beams(rng, 3, 4, np.arange(1, 7))
    logits = torch.from_numpy(rng.normal(size=(3, 4, tree.num_codes))).float()
    node_filter, predicates = random_filter(rng, tree, 3) if seed % 2 else (None, None)
    widths = np.array([5, 2, 9])
    found = REFERENCE_OPS.search.beam_step(
        logits, None, as_beams(beams), tree.arrays, node_filter, torch.from_numpy(widths), 9
    )
    expect(found, plain_step(logits, None, beams, tree, predicates, widths), 9, exact=False)


def root_step(scores, width):
    """The children of one root with the given logits."""
    num = len(scores)
    trie = TrieArrays(torch.tensor([1, num + 1]), torch.tensor([-1, *range(num)]))
    root = torch.zeros(1, 1, dtype=torch.int64)
    beams = Beams(-torch.zeros(1, 1), root, root)  # −0.0 + −0.0 stays −0.0, so a negative zero reaches the ordering
    logits = torch.tensor(scores, dtype=torch.float32).view(1, 1, num)
    return REFERENCE_OPS.search.beam_step(logits, torch.zeros(1, 1), beams, trie, None, torch.tensor([width]), width)


def test_order_across_signs_and_zeros():
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    scores = [-1e30, -0.0, 1.5, 0.0, -tiny, tiny, -2.0, 1e30, -1.5, -0.0]
    found = root_step(scores, len(scores))
    # The two zeros are one number, so they tie and the lower node comes first.
    expected = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    assert (found.node[0] - 1).tolist() == expected


def test_neighbouring_floats_are_told_apart():
    below = [-3.0]
    for _ in range(6):
        below.append(float(np.nextafter(np.float32(below[-1]), np.float32(-10))))
    shuffled = [below[place] for place in (3, 0, 6, 1, 5, 2, 4)]
    assert root_step(shuffled, 7).score[0].tolist() == below


def test_all_beams_dead_gives_dead_beams():
    tree = Tree(np.random.default_rng(0))
    beams = as_beams([[(DEAD, 0)] * 3])
    found = REFERENCE_OPS.search.beam_step(
        torch.zeros(1, 3, tree.num_codes), torch.zeros(1, 3), beams, tree.arrays, None, torch.tensor([4]), 4
    )
    assert found.score.tolist() == [[DEAD] * 4]
    assert found.node.shape == found.parent.shape == (1, 4)


def test_a_request_keeps_its_own_width():
    found = root_step([5.0, 4.0, 3.0, 2.0], 4)
    trie = TrieArrays(torch.tensor([1, 5]), torch.tensor([-1, 0, 1, 2, 3]))
    root = torch.zeros(2, 1, dtype=torch.int64)
    both = REFERENCE_OPS.search.beam_step(
        torch.tensor([5.0, 4.0, 3.0, 2.0]).expand(2, 1, 4),
        torch.zeros(2, 1),
        Beams(torch.zeros(2, 1), root, root),
        trie,
        None,
        torch.tensor([2, 4]),
        4,
    )
    assert both.score.tolist() == [[5, 4, DEAD, DEAD], found.score[0].tolist()]


def test_strided_logits():
    wide = torch.arange(12.0).view(1, 2, 6)
    tree = Tree(np.random.default_rng(3), num=2, codes=3)
    beams = as_beams([[(0.0, 1), (-0.5, 2)]])
    arguments = (torch.zeros(1, 2), beams, tree.arrays, None, torch.tensor([6]), 6)
    found = REFERENCE_OPS.search.beam_step(wide[..., ::2], *arguments)
    same = REFERENCE_OPS.search.beam_step(wide[..., ::2].contiguous(), *arguments)
    assert torch.equal(found.score, same.score)
    assert torch.equal(found.node, same.node)


@pytest.mark.parametrize("seed", range(10))
def test_a_pass_runs_each_beams_newest_token_behind_its_ancestors(seed):
    """Three passes of random choices; a beam's path is followed in Python."""
    rng = np.random.default_rng(seed)
    requests, nodes = int(rng.integers(1, 5)), 30
    code = torch.tensor([-1, *rng.integers(0, 9, nodes).tolist()])
    lengths = rng.integers(1, 50, requests)
    paths = [[[]] for _ in range(requests)]  # of each request's beams: the rows of their earlier tokens
    ancestors = None
    for level in range(3):
        width, old_width = int(rng.integers(1, 6)), len(paths[0])
        node = rng.integers(0, nodes + 1, (requests, width))  # 0: a dead beam
        parent = rng.integers(0, old_width, (requests, width)) * (node > 0)
        beams = Beams(torch.zeros(requests, width), torch.from_numpy(node), torch.from_numpy(parent))
        rows = REFERENCE_OPS.search.next_rows(beams, ancestors, code, torch.from_numpy(lengths), 100 + 9 * level)
        if level:
            paths = [
                [[*old[beam], request * old_width + beam] for beam in parent[request]]
                for request, old in enumerate(paths)
            ]
        else:
            paths = [[[]] * width for _ in range(requests)]
        assert rows.ancestors.tolist() == [path for of_request in paths for path in of_request]
        assert rows.token_ids.tolist() == [100 + 9 * level + max(int(code[n]), 0) for n in node.flatten()]
        assert rows.positions.tolist() == [int(length) + level for length in lengths for _ in range(width)]
        assert {part.dtype for part in (rows.token_ids, rows.positions, rows.ancestors)} == {torch.int64}
        ancestors = rows.ancestors


@pytest.mark.parametrize("seed", range(20))
def test_constrained_topk_equals_sorting_in_python(seed):
    rng = np.random.default_rng(seed)
    rows, codes, k = int(rng.integers(1, 5)), int(rng.integers(1, 30)), int(rng.integers(1, 12))
    logits = eighths(rng, rows, codes)
    logits[torch.from_numpy(rng.random((rows, codes)) < 0.1)] = DEAD
    allowed = torch.from_numpy(rng.random((rows, codes)) < rng.random())
    values, indices = REFERENCE_OPS.search.constrained_topk(logits, allowed, k)
    assert (values.dtype, indices.dtype) == (torch.float32, torch.int64)
    for row in range(rows):
        legal = [(-float(logits[row, code]), code) for code in range(codes) if allowed[row, code]]
        legal = [pair for pair in sorted(legal) if pair[0] != math.inf][:k]
        missing = k - len(legal)
        assert values[row].tolist() == [-value for value, _ in legal] + [DEAD] * missing
        assert indices[row].tolist() == [code for _, code in legal] + [0] * missing


@pytest.mark.parametrize("shape", [(1, 8), (6, 16), (2, 3, 8)])
def test_restricted_log_softmax_in_float64(shape):
    generator = torch.Generator().manual_seed(9)
    hidden, weight = torch.randn(shape, generator=generator), torch.randn(21, shape[-1], generator=generator)
    logits, lse = REFERENCE_OPS.search.restricted_log_softmax(hidden, weight)
    wide = hidden.double().numpy() @ weight.double().numpy().T
    assert lse.shape == shape[:-1]
    np.testing.assert_allclose(logits.numpy(), wide, atol=1e-5)
    np.testing.assert_allclose(lse.numpy(), np.logaddexp.reduce(wide, axis=-1), atol=1e-5)
    half = REFERENCE_OPS.search.restricted_log_softmax(hidden.bfloat16(), weight.bfloat16())
    assert [part.dtype for part in half] == [torch.float32] * 2
