"""Compares what an implementation returned with the reference's result in a wider dtype, tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from .spec import FP8, Tolerance

FaultKind = Literal[
    "no_dtype",
    "structure",
    "dtype",
    "shape",
    "device",
    "value",
    "argument_written",
    "aliasing",
    "strided",
    "gradient",
    "capture",
]
Finding = tuple[FaultKind, str]
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
_SCALE_FLOOR = 1e-6  # rows of zeros may have any small scale
# A value on the border of two e4m3 numbers may become either, but few are: 3 to 6 % after another rounding in bf16, which
# moves the mean by 0.5 %; a mantissa bit less moves it by 4 %.
_MEAN_ERROR = 0.015


def tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside a result or an argument (tensor, tuple, dataclass), each with its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for place, part in enumerate(value):
            yield from tensors(part, f"{name}[{place}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name), f"{name}.{field.name}")


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with every tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, part) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: map_tensors(function, getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def widen(tensor: Tensor) -> Tensor:
    """A copy in the wider dtype of references; integers, bool and fp8 keep theirs."""
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype), copy=True)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def compare(
    found: Any,
    expected: Any,
    typed: Any,
    tolerance: Mapping[torch.dtype, Tolerance],
    case_dtype: torch.dtype,
    device_type: str,
    name: str = "result",
) -> Iterator[Finding]:
    """found: the implementation's. expected: the reference's on widened inputs. typed: its result on the inputs themselves,
    for structure, dtypes and shapes. case_dtype: whose tolerance a quantised row's scale gets."""
    found_tensors, expected_tensors = list(tensors(found, name)), [tensor for _, tensor in tensors(expected, name)]
    typed_tensors = list(tensors(typed, name))
    names = [part for part, _ in found_tensors]
    if type(found) is not type(typed) or names != [part for part, _ in typed_tensors]:
        yield "structure", f"{_kind(found, name)} instead of {_kind(typed, name)}"
        return
    sound = True
    for (part, tensor), (_, like) in zip(found_tensors, typed_tensors, strict=True):
        for finding in _differs_in_kind(part, tensor, like, device_type):
            sound = False
            yield finding
    if not sound:
        return
    place = 0  # quantised values are followed by their scale, and compared together with it
    while place < len(names):
        tensor, wanted = found_tensors[place][1].cpu(), expected_tensors[place]
        if tensor.dtype == FP8 and place + 1 < len(names) and found_tensors[place + 1][1].dtype == torch.float32:
            scale, wanted_scale = found_tensors[place + 1][1].cpu(), expected_tensors[place + 1]
            yield from _quantised(names[place], (tensor, scale), (wanted, wanted_scale), tolerance, case_dtype)
            place += 2
            continue
        yield from differs(names[place], tensor, wanted, tolerance)
        place += 1


def differs(
    name: str, found: Tensor, expected: Tensor, tolerance: Mapping[torch.dtype, Tolerance], *, largest: bool = False
) -> Iterator[Finding]:
    """largest: the absolute tolerance grows with the largest value, as for gradients, which are sums of many terms."""
    if not found.is_floating_point():
        if not torch.equal(found, expected):
            yield "value", f"{name} differs in {int((found != expected).sum())} of {found.numel()} places"
        return
    limit = tolerance[found.dtype]
    expected = expected.double()
    size = float(expected.abs().max().clamp_min(1.0)) if largest and expected.numel() else 1.0
    yield from _beyond(name, found.double(), expected, limit.absolute * size + limit.relative * expected.abs())


def _differs_in_kind(name: str, found: Tensor, like: Tensor, device_type: str) -> Iterator[Finding]:
    if found.dtype != like.dtype:
        yield "dtype", f"{name} is {_short(found.dtype)} instead of {_short(like.dtype)}"
    if found.shape != like.shape:
        yield "shape", f"{name} is {list(found.shape)} instead of {list(like.shape)}"
    if found.device.type != device_type:
        yield "device", f"{name} is on {found.device.type} instead of {device_type}"


def _quantised(
    name: str,
    found: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    tolerance: Mapping[torch.dtype, Tolerance],
    case_dtype: torch.dtype,
) -> Iterator[Finding]:
    """Values are compared as they are read back, each and on average; scales within the tolerance of what was quantised."""
    scale = expected[1].double()
    yield from _beyond(
        f"{name}'s scale", found[1].double(), scale, _SCALE_FLOOR + tolerance[case_dtype].relative * scale.abs()
    )
    limit, values, wanted = tolerance[FP8], _dequantise(*found), _dequantise(*expected)
    absolute = limit.absolute * scale.repeat_interleave(wanted.shape[-1] // scale.shape[-1], -1)
    yield from _beyond(f"{name} · scale", values, wanted, absolute + limit.relative * wanted.abs())
    error, size = float((values - wanted).abs().mean()), float(wanted.abs().mean())
    if error > _MEAN_ERROR * size:
        yield "value", f"{name} · scale is off by {error:.3g} on average, where {_MEAN_ERROR * size:.3g} is allowed"


def _dequantise(quantised: Tensor, scale: Tensor) -> Tensor:
    return quantised.double() * scale.double().repeat_interleave(quantised.shape[-1] // scale.shape[-1], -1)


def _beyond(name: str, found: Tensor, expected: Tensor, limit: Tensor) -> Iterator[Finding]:
    """All fp64. Infinities must be equal; a NaN is always wrong, for no reference makes one from a case."""
    fine = (found == expected) | ((found - expected).abs() <= limit)
    if not bool(fine.all()):
        error = (found - expected).abs().masked_fill(fine, 0).nan_to_num(nan=float("inf")).reshape(-1)
        worst = int(error.argmax())
        yield (
            "value",
            f"{name} is wrong in {int((~fine).sum())} of {fine.numel()} places, for example "
            f"{float(found.reshape(-1)[worst]):.6g} instead of {float(expected.reshape(-1)[worst]):.6g} "
            f"(allowed difference {float(limit.expand_as(expected).reshape(-1)[worst]):.2g})",
        )


def _kind(value: Any, name: str) -> str:
    return f"{type(value).__name__} of {len(list(tensors(value, name)))} tensors"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
