"""A packed batch gives the losses and gradients that each target gives alone, and nothing passes between neighbours."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import tiny_model

from polyrec.attention.layout import packed_layout
from polyrec.attention.sdpa import PackedPlan
from polyrec.data.packing import Example, pack
from polyrec.data.prompt import PromptBuilder, PromptConfig
from polyrec.hardware import get_hardware_backend
from polyrec.sid.layout import SidLayout
from polyrec.training.objective import Objective


def random_examples(rng, layout, *, prompt_weight=0.0, basket_weight=0.0):
    builder = PromptBuilder(layout, PromptConfig(max_items=5))

    def draw(num):
        return np.stack([rng.integers(0, size, num) for size in layout.codebook_sizes], axis=1)

    examples = []
    for _ in range(int(rng.integers(2, 5))):
        length, num = int(rng.integers(0, 7)), int(rng.integers(1, 4))
        prompt = builder.build(draw(length), np.sort(rng.integers(0, 3, length)))
        examples.append(Example(prompt, draw(num), rng.random(num) + 0.1, prompt_weight, basket_weight))
    return examples


def objective(model, layout, head):
    return Objective(layout, head, get_hardware_backend(), model.attention_needs(model.head_weight.dtype, train=True))


def alone(model, tokens):
    """Hidden states of one sequence by itself."""
    ids = torch.as_tensor(tokens)
    return model(ids, torch.arange(len(ids)), PackedPlan(packed_layout(torch.tensor([len(ids)]))))


def cross_entropy(model, layout, hidden, level, code, head):
    """−log p of one code, from float64 logits of the level's rows or of all rows."""
    start, size = layout.level_starts[level], layout.codebook_sizes[level]
    logits = model.head_weight @ hidden
    over = logits[start : start + size] if head == "level" else logits
    return torch.logsumexp(over, 0) - logits[start + code]


def plain_losses(model, layout, examples, head):
    """Per level the pairs (weight, loss) of all labels, each target run as its own sequence."""
    losses = [[] for _ in range(layout.depth)]
    for example in examples:
        for target, weight in zip(example.targets, example.weights, strict=True):
            hidden = alone(model, np.append(example.prompt, layout.tokens(target)))
            for level, code in enumerate(target.tolist()):
                at = hidden[len(example.prompt) - 1 + level]
                losses[level].append((weight, cross_entropy(model, layout, at, level, code, head)))
        hidden, opened = alone(model, example.prompt), None
        for place, token in enumerate(example.prompt.tolist()):
            if token == layout.begin:
                opened = place
                continue
            level = max(lv for lv, start in enumerate(layout.level_starts) if start <= token)
            code = token - layout.level_starts[level]
            if example.prompt_weight:
                loss = cross_entropy(model, layout, hidden[place - 1], level, code, head)
                losses[level].append((example.prompt_weight, loss))
            if example.basket_weight and level == 0:
                loss = cross_entropy(model, layout, hidden[opened], level, code, head)
                losses[level].append((example.basket_weight, loss))
    return losses


def weighted_mean(pairs):
    return sum(weight * loss for weight, loss in pairs) / sum(weight for weight, _ in pairs)


@pytest.mark.parametrize("head", ["level", "vocab"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize(("prompt_weight", "basket_weight"), [(0.0, 0.0), (0.7, 0.3)])
def test_loss_and_gradients_equal_each_target_alone(head, depth, prompt_weight, basket_weight):
    rng = np.random.default_rng(depth)
    layout = SidLayout.contiguous(tuple(rng.integers(2, 7, depth).tolist()), 2)
    packed = tiny_model(layout, seed=depth).double()
    plain = copy.deepcopy(packed)
    examples = random_examples(rng, layout, prompt_weight=prompt_weight, basket_weight=basket_weight)

    loss = objective(packed, layout, head)(packed, pack(examples, layout))
    loss.mean.backward()
    by_level = plain_losses(plain, layout, examples, head)
    expected = weighted_mean([pair for level in by_level for pair in level])
    expected.backward()

    assert loss.mean.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = [weighted_mean(level).item() for level in by_level]
    np.testing.assert_allclose(loss.by_level.numpy(), wanted, rtol=1e-5)
    assert not loss.by_level.requires_grad
    for (name, ours), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
            continue
        scale = max(theirs.grad.abs().max().item(), 1e-3)
        torch.testing.assert_close(ours.grad / scale, theirs.grad / scale, rtol=1e-4, atol=1e-5, msg=name)


def test_hidden_states_equal_each_target_alone():
    """In float64, so that only exact equality of what is attended to passes."""
    rng = np.random.default_rng(7)
    layout = SidLayout.contiguous((5, 6, 7), 2)
    model = tiny_model(layout, seed=1).double()
    examples = random_examples(rng, layout)
    batch = pack(examples, layout)
    hidden = run_packed(model, batch)
    start = 0
    for example, length in zip(examples, batch.lengths.tolist(), strict=True):
        num_prompt = len(example.prompt)
        branches = hidden[start + num_prompt : start + length].unflatten(0, (len(example.targets), layout.depth - 1))
        for branch, target in zip(branches, example.targets, strict=True):
            expected = alone(model, np.append(example.prompt, layout.tokens(target)[:-1]))
            found = torch.cat((hidden[start : start + num_prompt], branch))
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        start += length


def run_packed(model, batch):
    layout = packed_layout(torch.from_numpy(batch.lengths), torch.from_numpy(batch.branch))
    return model(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), PackedPlan(layout))


def test_nothing_passes_between_sequences_or_branches():
    rng = np.random.default_rng(8)
    layout = SidLayout.contiguous((5, 6, 7), 2)
    model = tiny_model(layout, seed=2).double()
    batch = pack(random_examples(rng, layout), layout)
    before = run_packed(model, batch)
    owner = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    place = np.concatenate([np.arange(length) for length in batch.lengths])
    for changed in range(len(batch.token_ids)):
        tokens = batch.token_ids.copy()
        tokens[changed] = (tokens[changed] + 1) % layout.begin
        after = run_packed(model, replace(batch, token_ids=tokens))
        moved = ((after - before).abs().amax(-1) > 0).numpy()
        same_branch = (batch.branch == batch.branch[changed]) | (batch.branch[changed] == 0)
        expected = (owner == owner[changed]) & same_branch & (place >= place[changed])
        np.testing.assert_array_equal(moved, expected)


def test_a_batch_without_weight_has_no_loss_and_a_finite_gradient():
    """repeat_weight 0 can leave a small batch without any label that counts."""
    layout = SidLayout.contiguous((5, 6, 7), 2)
    model = tiny_model(layout, seed=2)
    examples = [
        replace(example, weights=example.weights * 0) for example in random_examples(np.random.default_rng(9), layout)
    ]
    loss = objective(model, layout, "level")(model, pack(examples, layout))
    loss.mean.backward()
    assert loss.mean.item() == 0
    assert all(weight.grad is None or weight.grad.abs().max() == 0 for weight in model.parameters())
