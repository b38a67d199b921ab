"""Which examples a training step sees. A step's batch follows from the seed and the step's number alone, so a resumed run
needs no loader state. Imports no torch."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from ..core.config import Settings
from ..core.errors import TrainingError
from .histories import Histories, event_owners
from .packing import Example, PackedBatch, pack
from .prompt import PromptBuilder


class SamplingConfig(Settings):
    """How examples are drawn.

    batch_size: examples a step. max_targets: branches per example, drawn from the target basket.
    shuffle_baskets: order inside a basket is drawn anew each time (it means nothing).
    drop_items: share of history items left out at random, anew each time, against learning histories by heart (Beauty,
    validation NDCG@10: .042 without, .053 with 0.2); by default 0.2 without baskets and 0 with them, where it hurts repeats.
    complete_baskets: share of examples whose prompt already holds a part of the target basket.
    first_baskets: a user's first basket is an example too, a part of it being the history of the rest.
    prompt_weight: weight of the codes inside prompts (0: targets only). basket_weight: weight of every item's first code as
    predicted from the start of its basket in the prompt. repeat_weight: weight of targets already in the
    history; 0 trains for new items only.
    """

    batch_size: int = Field(64, ge=1)
    max_targets: int = Field(32, ge=1)
    shuffle_baskets: bool = True
    drop_items: float | None = Field(None, ge=0, lt=1)
    complete_baskets: float = Field(0.1, ge=0, le=1)
    prompt_weight: float = Field(1.0, ge=0)
    basket_weight: float = Field(0.0, ge=0)
    first_baskets: bool = False
    repeat_weight: float = Field(1.0, ge=0)


class ExampleLoader:
    """Draws batches from histories that end before the stage they are judged on.

    codes: int32 [I, S] of the catalog. An epoch visits every basket that has a history before it once (in data without
    baskets: every user once, with the last event as target and the earlier ones labelled inside the prompt).
    """

    def __init__(
        self, histories: Histories, codes: np.ndarray, prompts: PromptBuilder, config: SamplingConfig, seed: int
    ) -> None:
        self._histories = histories
        self._codes = codes
        self._prompts = prompts
        self._config = config
        self._seed = seed
        self._starts = example_starts(histories, first_baskets=config.first_baskets)
        default = 0.2 if histories.kind == "sequence" else 0.0
        self._drop_items = default if config.drop_items is None else config.drop_items
        self._epoch_order = (-1, np.zeros(0, np.int64))
        if len(self._starts) == 0:
            raise TrainingError(
                "nothing_to_train_on",
                "No user has two baskets (or events) before the split.",
                "Use more data, or another --split.",
            )

    @property
    def examples_per_epoch(self) -> int:
        return len(self._starts)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._starts) // self._config.batch_size)

    def batch(self, step: int) -> PackedBatch:
        """The batch of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        size = self._config.batch_size
        rng = np.random.default_rng([self._seed, epoch, place])
        examples = [self._example(int(index), rng) for index in order[place * size : (place + 1) * size]]
        return pack(examples, self._prompts.layout)

    def _order(self, epoch: int) -> np.ndarray:
        """The epoch's permutation of examples, drawn once an epoch."""
        if self._epoch_order[0] != epoch:
            self._epoch_order = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._starts))
        return self._epoch_order[1]

    def _example(self, index: int, rng: np.random.Generator) -> Example:
        """Events before `begin` are history, `begin … end` is the target basket."""
        first, begin, end = self._starts[index]
        items, baskets = self._histories.items, self._histories.baskets
        history, history_baskets, target = items[first:begin], baskets[first:begin], items[begin:end]
        config = self._config
        if config.shuffle_baskets:
            # Before the prompt is cut, so that a basket on the edge loses other items each time.
            order = np.lexsort((rng.random(len(history)), history_baskets))
            history = history[order]
            target = rng.permutation(target)
        complete = begin == first or rng.random() < config.complete_baskets
        given = int(rng.integers(1, len(target))) if len(target) > 1 and complete else 0
        if given:
            history = np.concatenate([history, target[:given]])
            history_baskets = np.concatenate([history_baskets, np.full(given, baskets[begin])])
            target = target[given:]
        target = target[: config.max_targets]
        weights = np.where(np.isin(target, history), config.repeat_weight, 1.0)
        if self._drop_items:
            kept = rng.random(len(history)) >= self._drop_items
            kept[-1] = True  # the newest stays, so that no history is empty
            history, history_baskets = history[kept], history_baskets[kept]
        prompt = self._prompts.build(self._codes[history], history_baskets)
        return Example(prompt, self._codes[target], weights, config.prompt_weight, config.basket_weight)


def example_starts(histories: Histories, *, first_baskets: bool) -> np.ndarray:
    """int64 [N, 3]: first event of the user, first and one-past-last event of a target basket, history not empty.

    first_baskets: a user's first basket counts too if it has two items: a part of it is the history of the rest.
    """
    owner = event_owners(histories.offsets)
    opens = np.flatnonzero((np.diff(owner, prepend=-1) != 0) | (np.diff(histories.baskets, prepend=-1) != 0))
    ends = np.append(opens[1:], len(owner))
    first = histories.offsets[owner[opens]]
    if histories.kind == "sequence":
        kept = (opens > first) & (ends == histories.offsets[owner[opens] + 1])
    else:
        kept = (opens > first) | (first_baskets & (ends - opens > 1))
    return np.stack([first, opens, ends], axis=1)[kept].astype(np.int64)
