"""What an operation promises: the specification that stands beside each field of a group, and how groups are composed.

A group is a frozen dataclass of callables without defaults. Each field carries an `OpSpec` in its metadata, so adding an
operation is one field and one reference.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from ...core.errors import HardwareError
from .draw import Draw

Tier = Literal["R", "D", "X"]
Mode = Literal["infer", "train"]
Function = Callable[..., Any]
Lookup = Callable[[str], Function]
Case = dict[str, Any]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
BOTH: tuple[Mode, ...] = ("infer", "train")
INFER: tuple[Mode, ...] = ("infer",)
TRAIN: tuple[Mode, ...] = ("train",)


@dataclass(frozen=True)
class Tolerance:
    """|found − expected| ≤ absolute + relative · |expected|."""

    relative: float
    absolute: float


# Of results in each dtype against the reference in a wider one, for sums over up to a few hundred terms.
TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-10, 1e-10),
    torch.float32: Tolerance(2e-5, 2e-5),
    torch.float16: Tolerance(4e-3, 4e-3),
    torch.bfloat16: Tolerance(2.5e-2, 2.5e-2),
    FP8: Tolerance(0.13, 0.02),  # one step of e4m3's three mantissa bits
}


@dataclass(frozen=True)
class OpSpec:
    """reference: the meaning, in plain torch; its signature is every implementation's.

    shapes: arguments and results in words. cases: small inputs by parameter name, drawn anew for each dtype. dtypes: what
    floating inputs may be. tier: R needed to start; D decomposes into other operations, reported; X optional, refused when a
    configuration needs it. writes: arguments that are filled in place; every other argument stays as it was. views: arguments
    that results may be views of; with others no result shares memory. modes: infer, train (a gradient is needed) or both.
    graph_safe: implementations neither synchronise nor let shapes depend on values, so they can be captured. tolerance: by
    dtype of a result. needs, decompose: for tier D, the fields it is made of, and how, given a lookup of those; where it is
    made of torch's own calls, it needs none and decomposes into its reference. strided:
    arguments that may be views of wider rows, as the parts of a fused product are; all others are contiguous. constants:
    floating arguments without a gradient. rounds_inside: fp32 results come from values that were rounded to the inputs'
    dtype, so that one's tolerance is theirs.
    """

    reference: Function
    shapes: str
    cases: Callable[[Draw], Iterator[Case]]
    tier: Tier
    dtypes: tuple[torch.dtype, ...] = FLOATS
    writes: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = BOTH
    graph_safe: bool = True
    tolerance: Mapping[torch.dtype, Tolerance] = dataclasses.field(default_factory=lambda: TOLERANCES)
    needs: tuple[str, ...] = ()
    decompose: Callable[[Lookup], Function] | None = None
    strided: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    rounds_inside: bool = False

    def limits(self, case_dtype: torch.dtype) -> Mapping[torch.dtype, Tolerance]:
        """Tolerances by dtype of a result, for inputs in `case_dtype`."""
        if not self.rounds_inside:
            return self.tolerance
        inside = self.tolerance[case_dtype]
        return {dtype: max(own, inside, key=lambda one: one.relative) for dtype, own in self.tolerance.items()}

    def __post_init__(self) -> None:
        assert (self.tier == "D") == (self.decompose is not None), "tier D, and only it, says how it decomposes"
        assert self.decompose is not None or not self.needs, "what decomposes into nothing needs nothing"


def op(
    reference: Function,
    shapes: str,
    cases: Callable[[Draw], Iterator[Case]],
    *,
    needs: tuple[str, ...] = (),
    decompose: Callable[[Lookup], Function] | None = None,
    **rest: Any,
) -> dict[str, OpSpec]:
    """Metadata for a group's field: `rms_norm: Callable[…] = field(metadata=op(rms_norm, …, tier="R"))`.

    What `decompose` makes can do no more than the implementations it is made of, so it gets their claims. A tier D field
    without it decomposes into its reference.
    """
    made: Callable[[Lookup], Function] | None = None
    if decompose is not None:
        assert needs, "what an operation decomposes into is named"
        made = functools.partial(_decompose_with_claims, decompose, needs)
    elif rest["tier"] == "D":
        made = functools.partial(_its_reference, reference)
    return {"spec": OpSpec(reference, shapes, cases, needs=needs, decompose=made, **rest)}


def _its_reference(reference: Function, lookup: Lookup) -> Function:
    return reference


def _decompose_with_claims(decompose: Callable[[Lookup], Function], needs: tuple[str, ...], lookup: Lookup) -> Function:
    parts = [lookup(need) for need in needs]
    made = decompose(lookup)
    if made in parts:
        made = functools.partial(made)  # the part keeps its own claims
    claims = [claims_of(part) for part in parts]
    limits = [claim.dtypes for claim in claims if claim.dtypes is not None]
    return op_claims(
        dtypes=tuple(dtype for dtype in limits[0] if all(dtype in limit for limit in limits)) if limits else None,
        train=False if any(claim.train is False for claim in claims) else None,
        graph_safe=False if any(claim.graph_safe is False for claim in claims) else None,
    )(made)


def at_least_fp32(x: Tensor) -> Tensor:
    """What references compute in: fp32, or fp64 where the input is."""
    return x if x.dtype == torch.float64 else x.float()


def group_specs(group: type) -> dict[str, OpSpec]:
    """Field -> its specification, in the group's order."""
    return {field.name: field.metadata["spec"] for field in dataclasses.fields(group)}


@dataclass(frozen=True)
class Claims:
    """What an implementation does less than its specification: fewer dtypes, no gradient, no capture. None: as specified."""

    dtypes: tuple[torch.dtype, ...] | None = None
    train: bool | None = None
    graph_safe: bool | None = None


F = TypeVar("F", bound=Function)
_CLAIMS = "__polyrec_op_claims__"


def op_claims(
    *, dtypes: tuple[torch.dtype, ...] | None = None, train: bool | None = None, graph_safe: bool | None = None
) -> Callable[[F], F]:
    """Decorates an implementation that does less than its specification allows, for example only bf16, or no gradient."""

    def claim(function: F) -> F:
        setattr(function, _CLAIMS, Claims(dtypes, train, graph_safe))
        return function

    return claim


def claims_of(function: Function) -> Claims:
    """What `op_claims` recorded, else no restriction."""
    return getattr(function, _CLAIMS, Claims())


class Missing:
    """Stands in a group for an operation that a platform does not have; calling it is `op_not_available`."""

    def __init__(self, field: str = "") -> None:
        self.field = field

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise HardwareError(
            "op_not_available",
            f"This platform has no operation '{self.field}'.",
            "Turn off the feature that needs it, choose another platform, or load a plugin that has it (--extra-ops).",
        )

    def __repr__(self) -> str:
        return f"<no operation {self.field}>"


MISSING = Missing()
G = TypeVar("G")


def reference_group(group: type[G]) -> G:
    """The group with every field's reference."""
    return group(**{name: spec.reference for name, spec in group_specs(group).items()})


def partial_group(group: type[G], **implemented: Function) -> G:
    """A group of which a platform has only some fields; whether the rest may be missing is decided at start."""
    assert implemented.keys() <= group_specs(group).keys(), f"{group.__name__} has no {sorted(implemented)}"
    return group(**{name: implemented.get(name, MISSING) for name in group_specs(group)})
