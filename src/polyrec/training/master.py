"""AdamW for bf16 weights whose exact fp32 values live on: what bf16 leaves off is kept beside each weight, in 16 bits.

A step of 1e-4 is less than half the distance between two bf16 numbers near 0.1: added to a bf16 weight, it would be lost.
Bytes a parameter: 2 weight + 2 rest + 2 first moment (bf16) + 4 second moment = 10, and 2 of gradient during a step. Second
moments stay fp32: with beta2 near 1 their steps are below bf16's resolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Update = Callable[..., None]

BUCKET = 32 << 20  # numbers whose update takes a device longer than the host needs to launch the next one
ALONE = 2 << 20  # from so many numbers on a parameter is updated by itself: joining gradients is a pass over them
# Of a row that the update sees, where numbers make whole ones: then a compiler knows what their count is a multiple of.
# Compiled for any length the update took 25 ms for 1.7 billion numbers on an H200, where a copy of as many bytes would take 9.
ROW = 128


def join(upper: Tensor, rest: Tensor) -> Tensor:
    """upper: a bf16 weight's bits, int16. rest: int16 -> the fp32 value whose bits are upper · 2¹⁶ + rest."""
    return ((upper.to(torch.int32) << 16) + rest.to(torch.int32)).view(torch.float32)


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `join`: upper is the nearest bf16 number, of two equally near ones the larger in magnitude."""
    bits = value.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16), (bits - (upper << 16)).to(torch.int16)


def update(upper: Tensor, rest: Tensor, gradient: Tensor, first: Tensor, second: Tensor, numbers: Tensor) -> None:
    """One AdamW step of tensors of one shape, in place (Loshchilov and Hutter, 2019).

    numbers: fp32 [8] on the device: learning rate, weight decay, beta1, beta2, eps, the two bias corrections 1 − betaᵗ, and
    what the gradient is multiplied by; where that is not finite, nothing changes.
    """
    rate, decay, beta1, beta2, eps, correct1, correct2, scale = numbers.unbind()
    slope = gradient.float() * scale
    mean = first.float() * beta1 + slope * (1 - beta1)
    square = second * beta2 + slope * slope * (1 - beta2)
    value = join(upper, rest) * (1 - rate * decay) - rate / correct1 * mean / ((square / correct2).sqrt() + eps)
    new_upper, new_rest = split(value)
    is_sound = torch.isfinite(scale)
    for old, new in ((upper, new_upper), (rest, new_rest), (first, mean), (second, square)):
        old.copy_(torch.where(is_sound, new.to(old.dtype), old))


def approach(average: Tensor, upper: Tensor, rest: Tensor, share: Tensor) -> None:
    """Moves fp32 averages in place by a share, fp32 [] on their device, of the way to the values of upper and rest."""
    average.lerp_(join(upper, rest), share)


class Bucket:
    """Parameters that are updated together: they become views into one flat bf16 tensor, in order."""

    def __init__(self, parameters: list[Tensor], group: int) -> None:
        self.parameters = parameters
        self.group = group
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            parameter.data = part.view(parameter.shape)
        self.upper = flat.view(torch.int16)
        self.rest = torch.zeros_like(self.upper)
        self.first = torch.zeros_like(flat)
        self.second = torch.zeros_like(flat, dtype=torch.float32)

    def gradient(self) -> Tensor:
        """Flat; a parameter without one counts as one whose gradient is zero."""
        parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters]
        return parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])

    def rows(self) -> tuple[Tensor, ...]:
        """What `update` takes before its numbers: weights, rests, gradient and moments, in rows where they make whole ones."""
        return in_rows(self.upper, self.rest, self.gradient(), self.first, self.second)

    def values(self) -> list[Tensor]:
        """Of each parameter, in fp32."""
        parts = join(self.upper, self.rest).split([parameter.numel() for parameter in self.parameters])
        return [part.view(own.shape) for own, part in zip(self.parameters, parts, strict=True)]

    def state(self) -> dict[str, Tensor]:
        return {"rest": self.rest, "first": self.first, "second": self.second}


class MasterAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` over bf16 parameters with fp32 masters.

    step_function: what updates one bucket: `update`, or a compiled form of it. average_function: `approach`, likewise.
    gradient_scale: what the next step multiplies gradients by, for clipping without a pass of its own; a tensor on their device
    makes nobody wait. A step whose scale is not finite counts, and changes no weight or moment.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
        step_function: Update = update,
        average_function: Update = approach,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.gradient_scale: float | Tensor = 1.0
        self._update = step_function
        self._approach = average_function
        self._steps = 0
        self._buckets = [
            Bucket(parameters, index)
            for index, group in enumerate(self.param_groups)
            for parameters in in_buckets(group["params"])
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are made before a step"
        self._steps += 1
        numbers = {index: self._numbers(group) for index, group in enumerate(self.param_groups) if group["params"]}
        for one in self._buckets:
            self._update(*one.rows(), numbers[one.group])
        self.gradient_scale = 1.0

    def masters(self) -> dict[Tensor, Tensor]:
        """Parameter -> its fp32 value."""
        return {own: value for one in self._buckets for own, value in zip(one.parameters, one.values(), strict=True)}

    @torch.no_grad()
    def average_into(self, averages: Mapping[Tensor, Tensor], share: float) -> None:
        """Moves each parameter's fp32 average by that share of the way to its master, 1 for all of it.

        Compiled it is one pass, 12 bytes a number, and no master is written out: all of them are as large as the averages.
        """
        for one in self._buckets:
            targets = [averages[parameter] for parameter in one.parameters]
            if len(targets) > 1:
                torch._foreach_lerp_(targets, one.values(), share)
                continue
            flat = in_rows(targets[0].detach().view(-1), one.upper, one.rest)
            self._approach(*flat, torch.full((), share, device=one.upper.device))

    def state_dict(self) -> dict[str, Any]:
        """Every tensor in its own dtype (the base class would give all of them the parameters' when it loads)."""
        return {"steps": self._steps, "buckets": [one.state() for one in self._buckets]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = state_dict["steps"]
        for one, saved in zip(self._buckets, state_dict["buckets"], strict=True):
            for name, tensor in one.state().items():
                tensor.copy_(saved[name])

    def _numbers(self, group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        corrections = (1 - beta1**self._steps, 1 - beta2**self._steps)
        values = torch.tensor([group["lr"], group["weight_decay"], beta1, beta2, group["eps"], *corrections])
        device = group["params"][0].device
        # From pageable memory the host would wait here until the backward pass is done.
        pinned = values if values.device == device else values.pin_memory()
        scale = torch.as_tensor(self.gradient_scale, dtype=torch.float32).reshape(1).to(device)
        return torch.cat([pinned.to(device, non_blocking=True), scale])


def in_rows(*flat: Tensor) -> tuple[Tensor, ...]:
    """Flat tensors of one length, in rows of ROW where they make whole ones."""
    return flat if len(flat[0]) % ROW else tuple(part.view(-1, ROW) for part in flat)


def in_buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Large parameters by themselves, then the others in order, in buckets of at least BUCKET numbers but for the last."""
    found: list[Tensor] = []
    for parameter in parameters:
        assert parameter.dtype == torch.bfloat16, f"a {parameter.dtype} parameter needs no master"
    yield from ([parameter] for parameter in parameters if parameter.numel() >= ALONE)
    for parameter in parameters:
        if parameter.numel() >= ALONE:
            continue
        found.append(parameter)
        if sum(one.numel() for one in found) >= BUCKET:
            yield found
            found = []
    if found:
        yield found
