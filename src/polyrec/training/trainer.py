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
from ..hardware.ops import PlatformOps
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
    """What one step tells. step: from 1. loss: mean over labels; by_level: of each SID level. tokens: packed tokens run.
    seconds: until loss and norm were known; what was left of the last step's update is in it, this one's is not, so that over a
    loop without pauses they add up to what it took."""

    step: int
    loss: float
    by_level: tuple[float, ...]
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float


class Trainer:
    """Model, optimizer and data of one run. `progress` says where it is; whoever resumes a run sets it.

    ops: the device's. compiled: one kernel updates a parameter. The average, a copy of the model, is fp32 whatever the
    model's dtype is.
    """

    def __init__(
        self,
        model: Decoder,
        loader: ExampleLoader,
        objective: Objective,
        config: OptimConfig,
        steps: int,
        *,
        ops: PlatformOps,
        compiled: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = make_optimizer(model, config, compiled=compiled)
        self.averaged = RunningAverage(model, config.ema_decay) if config.ema_decay else None
        self.progress = Progress()
        self._loader = loader
        self._objective = objective
        self._total_norm = ops.optim.total_norm
        self._config = config
        self._steps = steps
        self._next: tuple[int, PackedBatch] | None = None  # the batch of a step to come

    @property
    def result(self) -> Decoder:
        """The model to judge and to keep: the running average of the weights, where there is one."""
        return self.model if self.averaged is None else cast(Decoder, self.averaged.module)

    def train_step(self) -> StepFacts:
        """Batch, forward, backward, clip, update, average. The host waits for the device once: for loss and norm, when all is
        queued, or before the update where no masters keep the weights from a norm that is not finite.

        Update and average may still run when this returns, and the next step is queued behind them. Whoever reads weights or
        optimizer on this stream gets the finished ones; another stream has to wait for this one first.
        """
        started = time.perf_counter()
        step = self.progress.step
        batch = self._take_batch(step)
        rate = self._set_rate(step)
        self.optimizer.zero_grad(set_to_none=True)  # before the forward pass: its peak needs the last gradients' memory
        loss = self._objective(self.model, batch)
        loss.mean.backward()
        norm = self._clip()
        told = torch.stack([loss.mean.detach().float(), norm.float(), *loss.by_level.float()])
        facts, known = self._objective.runtime.to_host_async(told)  # queued ahead of the update, for which nobody waits
        if self._masters is None:
            known.synchronize()
            self._check_norm(step, facts, rate)
        self.optimizer.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model, self._masters)
        if step + 1 < self._steps:
            with contextlib.suppress(Exception):  # the step that needs it meets the error; this one's work is done
                self._next = (step + 1, self._loader.batch(step + 1))  # while the device works
        known.synchronize()
        self._check_norm(step, facts, rate)
        mean, length, *by_level = facts.tolist()
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

    def _clip(self) -> torch.Tensor:
        """Clips the gradient, and returns its norm, which nobody has waited for. With masters one that is not finite changes
        none of them, and the run stops after the step; without them it has to be seen before the update."""
        most = self._config.clip_norm
        if not isinstance(self.optimizer, MasterAdamW):
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = self._total_norm(gradients)
        scale = (most / (norm + 1e-6)).clamp_max(1.0)  # as torch's own clipping
        self.optimizer.gradient_scale = torch.where(norm.isfinite(), scale, norm)
        return norm

    @staticmethod
    def _check_norm(step: int, facts: torch.Tensor, rate: float) -> None:
        """facts: on the host, of which the first are loss and norm."""
        loss, norm = facts[:2].tolist()
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
