"""Numeric conformance of one implementation: forward, aliasing, views, gradient and capture, against its reference.

The reference runs on the host in a wider dtype, so that an implementation is not judged by another one's rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..base.graph import Graph
from ..base.runtime import Runtime
from .compare import FaultKind, Finding, compare, differs, map_tensors, same_bits, tensors, widen
from .draw import Draw
from .spec import FP8, Case, Function, OpSpec, claims_of

Level = Literal["quick", "full"]


@dataclass(frozen=True)
class Fault:
    """One way in which an implementation is not what its specification says. dtype: of the case, as `bfloat16`."""

    kind: FaultKind
    dtype: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.dtype}): {self.message}"


class CheckRaised(Exception):
    """The implementation, or its capture, raised; the cause is chained. Callers turn this into their own error."""

    def __init__(self, field: str, dtype: str) -> None:
        super().__init__(f"'{field}' raised an exception on a {dtype} case of its check.")
        self.field = field
        self.dtype = dtype


def check_op(
    field: str,
    spec: OpSpec,
    function: Function,
    *,
    runtime: Runtime,
    graph: Graph,
    dtypes: Iterable[torch.dtype],
    train: bool,
    level: Level,
) -> list[Fault]:
    """What is wrong with `function` as `field` on the runtime's device; empty: nothing found.

    dtypes: what the device supports. train: gradients are needed. level: quick, one dtype and one case, for every start;
    full, all of them and views of wider rows. What `op_claims` leaves out is not checked. Errors: `CheckRaised`.
    """
    claimed = claims_of(function).dtypes
    supported = set(dtypes)
    chosen = [dtype for dtype in spec.dtypes if dtype in supported and (claimed is None or dtype in claimed)]
    if not chosen:
        claim = ", ".join(_name(dtype) for dtype in (spec.dtypes if claimed is None else claimed)) or "nothing"
        return [
            Fault("no_dtype", claim, f"takes {claim}, of which the device supports none, so nothing can be checked")
        ]
    full = level == "full"
    faults: list[Fault] = []
    with torch.inference_mode(False):
        for dtype in chosen if full else chosen[:1]:
            check = _Check(field, spec, function, runtime, graph, dtype)
            # The second draw has the same shapes and other values: what a captured graph must follow.
            pairs = zip(spec.cases(Draw(dtype, 0, full=full)), spec.cases(Draw(dtype, 1, full=full)), strict=True)
            for case, other in pairs:
                faults += [Fault(kind, _name(dtype), text) for kind, text in check.case(case, other, train, full)]
    return faults


@dataclass(frozen=True)
class _Expected:
    """What the reference gives for one case: wide, and on the inputs themselves. written: arguments filled in place."""

    result: Any
    typed: Any
    written: tuple[Tensor, ...]


class _Check:
    """One implementation in one dtype."""

    def __init__(
        self, field: str, spec: OpSpec, function: Function, runtime: Runtime, graph: Graph, dtype: torch.dtype
    ) -> None:
        self._field = field
        self._spec = spec
        self._function = function
        self._runtime = runtime
        self._graph = graph
        self._dtype = dtype
        self._limits = spec.limits(dtype)
        self._claims = claims_of(function)
        self._names = tuple(inspect.signature(spec.reference).parameters)

    def case(self, case: Case, other: Case, train: bool, full: bool) -> Iterator[Finding]:
        """Findings of one case; where its plain run is wrong, the others would only say so again."""
        expected = self._expect(case)
        findings = list(self._forward(case, expected, strided=False))
        yield from findings
        if findings:
            return
        if full and self._spec.strided:
            for kind, text in self._forward(case, expected, strided=True):
                yield "strided" if kind == "value" else kind, f"with views of wider rows, {text}"
        if train and "train" in self._spec.modes and self._claims.train is not False:
            yield from self._gradient(case)
        if self._spec.graph_safe and self._claims.graph_safe is not False:
            yield from self._capture(case, other)

    def _arguments(self, case: Case) -> dict[str, Any]:
        """In the reference's order, as callers pass them."""
        return {name: case[name] for name in self._names}

    @torch.no_grad()
    def _expect(self, case: Case) -> _Expected:
        wide = map_arguments(widen, self._arguments(case))
        result = self._spec.reference(*wide.values())
        typed = self._spec.reference(*map_arguments(torch.clone, self._arguments(case)).values())
        return _Expected(result, typed, tuple(wide[name] for name in self._spec.writes))

    def _on_device(self, case: Case) -> dict[str, Any]:
        """Copies, so that nothing an implementation does reaches the case."""
        return map_arguments(lambda tensor: self._runtime.to_device(tensor.clone()), self._arguments(case))

    @torch.no_grad()
    def _forward(self, case: Case, expected: _Expected, *, strided: bool) -> Iterator[Finding]:
        arguments = self._on_device(case)
        memory = dict(arguments)  # what must not change: a view's whole rows
        if strided:
            for name in self._spec.strided:
                memory[name], arguments[name] = _view_of_wider_rows(arguments[name])
        before = {name: map_tensors(torch.clone, value) for name, value in memory.items()}
        with self._raised():
            found = self._function(*arguments.values())
            self._runtime.synchronize()
        yield from self._compare(found, expected, arguments, case)
        yield from self._compare_memory(memory, before)
        yield from _aliases(found, {name: arguments[name] for name in self._names if name not in self._spec.views})

    def _compare(self, found: Any, expected: _Expected, arguments: dict[str, Any], case: Case) -> Iterator[Finding]:
        common = self._limits, self._dtype, self._runtime.device.type
        yield from compare(found, expected.result, expected.typed, *common)
        for name, wanted in zip(self._spec.writes, expected.written, strict=True):
            yield from compare(arguments[name], wanted, case[name], *common, name=name)

    def _compare_memory(self, memory: dict[str, Any], before: dict[str, Any]) -> Iterator[Finding]:
        for name in memory:
            if name in self._spec.writes:
                continue
            for (part, now), (_, was) in zip(tensors(memory[name], name), tensors(before[name], name), strict=True):
                if not same_bits(now, was):
                    yield "argument_written", f"{part} was changed, and is no argument that is filled in place"

    def _gradient(self, case: Case) -> Iterator[Finding]:
        wide_outputs, wide_inputs = self._with_gradients(
            self._spec.reference, map_arguments(widen, self._arguments(case))
        )
        with self._raised():
            outputs, inputs = self._with_gradients(self._function, self._on_device(case))
        if not wide_outputs:  # an operation on gradients has none itself
            return
        lacking = [name for name in wide_outputs if name not in outputs]
        if lacking:
            yield "gradient", f"{', '.join(lacking)} has no gradient"
            return
        draw = Draw(torch.float32, 2)
        cotangents = {name: draw.normal(*output.shape) for name, output in wide_outputs.items()}
        expected = torch.autograd.grad(_pulled(wide_outputs, cotangents), list(wide_inputs.values()))
        with self._raised():
            moved = {name: self._runtime.to_device(cotangent) for name, cotangent in cotangents.items()}
            gradients = torch.autograd.grad(_pulled(outputs, moved), list(inputs.values()), allow_unused=True)
            self._runtime.synchronize()
        for name, gradient, wanted in zip(inputs, gradients, expected, strict=True):
            if gradient is None:
                yield "gradient", f"{name} gets no gradient"
                continue
            for _, text in differs(f"the gradient of {name}", gradient.cpu(), wanted, self._limits, largest=True):
                yield "gradient", text

    def _with_gradients(
        self, function: Function, arguments: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """-> the results that have a gradient, the inputs that need one."""
        inputs = {
            name: value.requires_grad_()
            for name, value in arguments.items()
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dtype != FP8
            and name not in self._spec.constants
        }
        with torch.enable_grad():
            result = function(*arguments.values())
        return {name: part for name, part in tensors(result, "result") if part.requires_grad}, inputs

    @torch.no_grad()
    def _capture(self, case: Case, other: Case) -> Iterator[Finding]:
        """Captured on one case's values and replayed on another's, in the same buffers."""
        expected = self._expect(other)
        buffers = self._on_device(case)
        new = self._on_device(other)
        with self._raised():
            captured = self._graph.capture(lambda: self._function(*buffers.values()))
        try:
            for name, buffer in buffers.items():
                for (_, place), (_, value) in zip(tensors(buffer, name), tensors(new[name], name), strict=True):
                    place.copy_(value)
            with self._raised():
                found = captured.replay()
                self._runtime.synchronize()
            for _, text in self._compare(found, expected, buffers, other):
                yield "capture", f"replayed on new values, {text}"
        finally:
            captured.close()

    @contextmanager
    def _raised(self) -> Iterator[None]:
        """Whatever the implementation raises becomes one error that keeps it."""
        try:
            yield
        except (Exception, SystemExit) as error:  # an operation that exits would end the command without a word
            raise CheckRaised(self._field, _name(self._dtype)) from error


def map_arguments(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with every tensor replaced."""
    return {name: map_tensors(function, value) for name, value in arguments.items()}


def _view_of_wider_rows(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """-> (three times as wide rows, the middle third of them with the tensor's values), as k is in a fused QKV product."""
    rows = tensor.reshape(len(tensor), -1)
    wide = rows.repeat(1, 3)
    wide[:, : rows.shape[1]].neg_()
    return wide, wide[:, rows.shape[1] : 2 * rows.shape[1]].unflatten(1, tensor.shape[1:])


def _pulled(outputs: dict[str, Tensor], cotangents: dict[str, Tensor]) -> Tensor:
    """The sum of outputs · cotangents; asking autograd for this scalar's gradient avoids `grad_outputs`, whose first use makes
    torch import sympy (250 ms)."""
    with torch.enable_grad():
        products = [(outputs[name] * cotangent.to(outputs[name].dtype)).sum() for name, cotangent in cotangents.items()]
        return torch.stack([product.float() for product in products]).sum()


def _aliases(found: Any, arguments: dict[str, Any]) -> Iterator[Finding]:
    owners = {
        part.untyped_storage().data_ptr(): name
        for argument, value in arguments.items()
        for name, part in tensors(value, argument)
        if part.numel()
    }
    for name, part in tensors(found, "result"):
        owner = owners.get(part.untyped_storage().data_ptr())
        if owner is not None and part.numel():
            yield "aliasing", f"{name} shares memory with {owner}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
