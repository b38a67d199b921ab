"""The training loop. `train_step` is the life of one step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch.optim.swa_utils import AveragedModel

from ..core.errors import TrainingError
from ..data.loader import ExampleLoader
from ..data.packing import PackedBatch
from ..models.spec import Decoder
from .master import MasterAdamW, approach, update
from .objective import Objective
from .recipe import OptimConfig, learning_rate


@dataclass
class Progress:
    """Where a run is. step: optimizer steps done. best: highest validation NDCG@10 and the step it was seen at.
    since_best: validations since. seconds: training time so far."""

    step: int = 0
    best: float = -1.0
    best_step: int = 0
    since_best: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class StepFacts:
    """What one step tells. step: from 1. loss: mean over labels; by_level: of each SID level. tokens: packed tokens run."""

    step: int
    loss: float
    by_level: tuple[float, ...]
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float


class Trainer:
    """Model, optimizer and data of one run. `progress` says where it is; whoever resumes a run sets it.

    compiled: one kernel updates a parameter. The average, a copy of the model, is fp32 whatever the model's dtype is.
    """

    def __init__(
        self,
        model: Decoder,
        loader: ExampleLoader,
        objective: Objective,
        config: OptimConfig,
        steps: int,
        *,
        compiled: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = make_optimizer(model, config, compiled=compiled)
        self.averaged = RunningAverage(model, config.ema_decay) if config.ema_decay else None
        self.progress = Progress()
        self._loader = loader
        self._objective = objective
        self._config = config
        self._steps = steps
        self._next: tuple[int, PackedBatch] | None = None  # the batch of a step to come

    @property
    def result(self) -> Decoder:
        """The model to judge and to keep: the running average of the weights, where there is one."""
        return self.model if self.averaged is None else cast(Decoder, self.averaged.module)

    def train_step(self) -> StepFacts:
        """Batch, forward, backward, clip, update, average. The host waits for the device once, when all of it is queued, and
        without masters for the gradient's norm too."""
        started = time.perf_counter()
        step = self.progress.step
        batch = self._take_batch(step)
        rate = self._set_rate(step)
        self.optimizer.zero_grad(set_to_none=True)  # before the forward pass: its peak needs the last gradients' memory
        loss = self._objective(self.model, batch)
        loss.mean.backward()
        norm = self._clip(step, loss.mean, rate)
        self.optimizer.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model, self._masters)
        if step + 1 < self._steps:
            with contextlib.suppress(Exception):  # the step that needs it meets the error; this one's work is done
                self._next = (step + 1, self._loader.batch(step + 1))  # while the device works
        mean, length, *by_level = torch.stack(
            [loss.mean.detach().float(), norm.float(), *loss.by_level.float()]
        ).tolist()
        self._check_norm(step, length, mean, rate)
        seconds = time.perf_counter() - started
        self.progress.step += 1
        self.progress.seconds += seconds
        return StepFacts(step + 1, mean, tuple(by_level), length, rate, len(batch.token_ids), seconds)

    def run(self, on_step: Callable[[StepFacts], bool]) -> None:
        """Steps until the last one, or until `on_step` returns False."""
        self.model.train()
        while self.progress.step < self._steps and on_step(self.train_step()):
            pass

    @property
    def _masters(self) -> MasterAdamW | None:
        """Who has the exact weights, where the model's are rounded."""
        return self.optimizer if isinstance(self.optimizer, MasterAdamW) else None

    def _set_rate(self, step: int) -> float:
        rate = learning_rate(self._config, step, self._steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _take_batch(self, step: int) -> PackedBatch:
        ready, self._next = self._next, None
        return ready[1] if ready is not None and ready[0] == step else self._loader.batch(step)

    def _clip(self, step: int, loss: torch.Tensor, rate: float) -> torch.Tensor:
        """Clips the gradient, and returns its norm. One that is not finite does not spoil the weights: a step with masters then
        changes none, and `_check_norm` stops the run after it, any other before it."""
        most = self._config.clip_norm
        if isinstance(self.optimizer, MasterAdamW):
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).float()
            scale = (most / (norm + 1e-6)).clamp_max(1.0)  # as torch's own clipping
            self.optimizer.gradient_scale = torch.where(norm.isfinite(), scale, norm)
            return norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)
        self._check_norm(step, float(norm), float(loss.detach()), rate)
        return norm

    @staticmethod
    def _check_norm(step: int, norm: float, loss: float, rate: float) -> None:
        if not math.isfinite(norm):
            raise TrainingError(
                "gradient_not_finite",
                f"Step {step + 1}: the gradient's norm is {norm}, the loss {loss:.4f}, the learning rate {rate:.2e}.",
                "Lower optim.learning_rate or optim.clip_norm; the last checkpoint is from before this step.",
            )


class RunningAverage(AveragedModel):
    """A copy of a model that follows it as an exponential average (Polyak and Juditsky, 1992).

    Early steps count for more, min(decay, (1 + n) / (10 + n)), so that a short run's average is not its start.
    """

    def __init__(self, model: Decoder, decay: float) -> None:
        super().__init__(model)
        self.module.to(torch.promote_types(next(model.parameters()).dtype, torch.float32))
        self._decay = decay

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module, masters: MasterAdamW | None = None) -> None:
        """As torch's own, which asks the device how many updates there were, and so waits for the step that is queued. masters:
        who has the exact values of the model's weights."""
        num = int(self.n_averaged)  # on the host
        share = 1 - min(self._decay, (1 + num) / (10 + num)) if num else 1.0
        averages, weights = tuple(self.module.parameters()), tuple(model.parameters())
        if masters is not None:
            masters.average_into(dict(zip(weights, averages, strict=True)), share)
        elif num == 0:
            torch._foreach_copy_(averages, weights)
        else:
            torch._foreach_lerp_(averages, weights, share)
        for own, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
            own.copy_(theirs)
        self.n_averaged += 1


def make_optimizer(model: torch.nn.Module, config: OptimConfig, *, compiled: bool = False) -> torch.optim.Optimizer:
    """AdamW; norms and biases do not decay (Loshchilov and Hutter, 2019). bf16 weights keep fp32 masters."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    rate, betas = config.learning_rate, (config.beta1, config.beta2)
    if matrices[0].dtype == torch.bfloat16:
        step, average = (torch.compile(one) if compiled else one for one in (update, approach))
        return MasterAdamW(groups, lr=rate, betas=betas, step_function=step, average_function=average)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True if compiled else None)
