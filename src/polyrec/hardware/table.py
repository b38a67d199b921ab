"""From a platform's groups and the plugins' fields to the operations that the process runs, with where each one comes from.

Tier R missing, or tier D missing where falling back is refused, ends the start with every such field in one message.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..core.errors import HardwareError
from .base.config import Fallback, Purpose
from .ops import PlatformOps, op_groups
from .ops.spec import Claims, Function, Missing, OpSpec, Tier, claims_of, group_specs
from .plugin.source import PluginSource

if TYPE_CHECKING:
    from .base.backend import HardwareBackend

Origin = Literal["built-in", "reference", "inherited", "plugin", "decomposed", "absent"]
_log = logging.getLogger("polyrec.hardware")


@dataclass(frozen=True)
class Replacement:
    """A plugin's implementation of one field."""

    function: Function
    source: PluginSource


@dataclass(frozen=True)
class OpRow:
    """One field of the table. implementation: `module:name`. source: the plugin, the platform inherited from, or empty."""

    field: str
    implementation: str
    origin: Origin
    source: str
    tier: Tier
    fallback: bool
    dtypes: tuple[str, ...]
    train: bool
    graph_safe: bool

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass
class Calls:
    """How often a fallback, or a plugin's operation, was called."""

    count: int = 0


@dataclass(frozen=True)
class OpTable:
    """ops: what the layers call. rows: every field in order. calls: counters by field, of fallbacks and plugins' fields.

    purpose: what the process is for.
    """

    ops: PlatformOps
    rows: tuple[OpRow, ...]
    calls: Mapping[str, Calls]
    purpose: Purpose

    def row(self, field: str) -> OpRow:
        """The row of `group.field`."""
        return next(row for row in self.rows if row.field == field)

    def fallback_calls(self) -> dict[str, int]:
        """Field -> calls, of the fields that fall back."""
        return {row.field: self.calls[row.field].count for row in self.rows if row.fallback}

    def never_called(self) -> list[OpRow]:
        """Plugins' fields that nothing has called yet, of those that the process's purpose may call."""
        specs = all_specs()
        return [
            row
            for row in self.rows
            if row.origin == "plugin" and self.calls[row.field].count == 0 and self.purpose in specs[row.field].modes
        ]

    def unsupported(self, dtype: torch.dtype) -> list[OpRow]:
        """Fields whose specification takes `dtype`, and whose implementation does not."""
        name = dtype_name(dtype)
        specs = all_specs()
        return [
            row
            for row in self.rows
            if row.origin != "absent" and dtype in specs[row.field].dtypes and name not in row.dtypes
        ]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all rows: two processes with the same one run the same implementations of the same versions."""
        text = json.dumps([row.to_dict() for row in self.rows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def all_specs() -> dict[str, OpSpec]:
    """`group.field` -> specification, of all groups in order."""
    specs: dict[str, OpSpec] = {}
    for name, group in op_groups().items():
        specs.update({f"{name}.{field}": spec for field, spec in group_specs(group).items()})
    return specs


def fuses(table: OpTable, field: str) -> bool:
    """Whether a tier D field has an implementation of its own, which passes over no plugin's operation that it contains."""
    origin, parts = table.row(field).origin, all_specs()[field].needs
    return origin == "plugin" or (
        origin in ("built-in", "inherited") and all(table.row(part).origin != "plugin" for part in parts)
    )


def is_replaced(table: OpTable, field: str) -> bool:
    """Whether a plugin's operation stands for a tier D field, or for one that it contains."""
    parts = all_specs()[field].needs
    return table.row(field).origin == "plugin" or any(table.row(part).origin == "plugin" for part in parts)


def resolve(
    platform: type, ops: PlatformOps, replacements: Mapping[str, Replacement], fallback: Fallback, purpose: Purpose
) -> OpTable:
    """Merges plugins over a platform's own fields and settles what is missing.

    platform: the backend class, whose module tells built-in from inherited. Errors: `op_missing`, `op_infer_only`.
    """
    resolver = _Resolver(platform, ops, replacements, fallback, purpose)
    chosen = {field: resolver.get(field) for field in resolver.specs}
    resolver.refuse_faults()
    groups: dict[str, dict[str, Function]] = {}
    for field, function in chosen.items():
        group, _, name = field.partition(".")
        groups.setdefault(group, {})[name] = function
    built = {name: cls(**groups[name]) for name, cls in op_groups().items()}
    rows = tuple(resolver.rows[field] for field in resolver.specs)
    return OpTable(PlatformOps(**built), rows, resolver.calls, purpose)


def report_never_called(backend: HardwareBackend) -> None:
    """Warns of plugins' operations that a first batch or step did not call: they were loaded and change nothing.

    For the engine after its first batch, and the trainer after its first step.
    """
    for row in backend.table.never_called():
        _log.warning(
            "[plugin_never_called] '%s' of plugin %s was not called: this model, or the way it runs here, does not use it.",
            row.field,
            row.source,
        )


class _Resolver:
    """One pass over all fields; a tier D field asks for the fields it is made of."""

    def __init__(
        self,
        platform: type,
        ops: PlatformOps,
        replacements: Mapping[str, Replacement],
        fallback: Fallback,
        purpose: Purpose,
    ) -> None:
        self.specs = all_specs()
        self.rows: dict[str, OpRow] = {}
        self.calls: dict[str, Calls] = {}
        self._chosen: dict[str, Function] = {}
        self._platform = platform
        self._ops = ops
        self._replacements = replacements
        self._fallback = fallback
        self._purpose = purpose
        self._missing: list[str] = []
        self._refused: list[str] = []
        self._infer_only: list[str] = []
        self._absent_for_now: set[str] = (
            set()
        )  # required, or made of nothing but such: the next start would miss them again

    def get(self, field: str) -> Function:
        """The function behind a field; chosen once."""
        if field not in self._chosen:
            self._chosen[field] = self._choose(field, self.specs[field])
        return self._chosen[field]

    def refuse_faults(self) -> None:
        """All faults of the table in one error."""
        name = self._platform.platform_name  # type: ignore[attr-defined]
        if self._missing or self._refused:
            parts = [f"{field} (required)" for field in self._missing]
            parts += [f"{field} (would fall back, which --fallback strict refuses)" for field in self._refused]
            raise HardwareError(
                "op_missing",
                f"Platform '{name}' lacks {len(parts)} operations: {', '.join(parts)}.",
                "Add them to the platform, load a plugin that has them (--extra-ops)"
                + (", or allow fallbacks (--fallback warn)." if self._refused else "."),
            )
        if self._infer_only:
            raise HardwareError(
                "op_infer_only",
                f"Training needs gradients, which these operations do not give: {', '.join(self._infer_only)}.",
                "Train without these plugins, or use versions with a backward pass.",
            )

    def _choose(self, field: str, spec: OpSpec) -> Function:
        replacement = self._replacements.get(field)
        if replacement is not None:
            if self._lacks_gradient(replacement.function, spec):
                self._infer_only.append(f"{field} of {replacement.source}")
            self._add_row(field, spec, replacement.function, "plugin", str(replacement.source))
            return self._counted(field, replacement.function)
        group, _, name = field.partition(".")
        function = getattr(getattr(self._ops, group), name)
        if isinstance(function, Missing) or self._lacks_gradient(function, spec):
            return self._fall_back(field, spec, None if isinstance(function, Missing) else function)
        origin, source = self._origin(function)
        self._add_row(field, spec, function, origin, source)
        return function

    def _fall_back(self, field: str, spec: OpSpec, infer_only: Function | None) -> Function:
        """What stands in for a missing field; infer_only: the platform's own, which cannot be trained with."""
        needed = self._purpose == "train" or "infer" in spec.modes  # training infers too, when it validates
        lacking = {need for need in spec.needs if isinstance(self.get(need), Missing)}
        made, source = None, "reference"
        if spec.decompose is not None and not lacking:
            made, source = spec.decompose(self.get), " + ".join(spec.needs) or "reference"
        elif infer_only is not None:
            made = spec.reference
        if made is None:
            if spec.tier == "R" and needed:
                self._missing.append(field)
                self._absent_for_now.add(field)
            elif spec.tier == "D" and needed and lacking <= self._absent_for_now:
                self._absent_for_now.add(field)
                self._refused += [field] if self._fallback == "strict" else []
            self.rows[field] = OpRow(field, "", "absent", "", spec.tier, False, (), False, False)
            return Missing(field)
        if self._fallback == "strict" and needed:
            self._refused.append(field)
        self._add_row(field, spec, made, "decomposed", source, fallback=True)
        lack = f"has no '{field}'" + ("" if infer_only is None else " with a gradient")
        return self._counted(field, made, lack if self._fallback == "warn" else "")

    def _lacks_gradient(self, function: Function, spec: OpSpec) -> bool:
        return self._purpose == "train" and "train" in spec.modes and claims_of(function).train is False

    def _origin(self, function: Function) -> tuple[Origin, str]:
        """The platform's own module (elsewhere: its package), the reference, or another platform's folder."""
        module = _module(function)
        own = self._platform.__module__
        if (root := own.split(".")[0]) != __name__.split(".")[0]:
            own = root
        if module == own or module.startswith(f"{own}."):
            return "built-in", ""
        if module.startswith(f"{__package__}.ops"):
            return "reference", ""
        backends = f"{__package__}.backends."
        return "inherited", module.removeprefix(backends).split(".")[0] if module.startswith(backends) else module

    def _add_row(
        self, field: str, spec: OpSpec, function: Function, origin: Origin, source: str, fallback: bool = False
    ) -> None:
        claims: Claims = claims_of(function)
        self.rows[field] = OpRow(
            field=field,
            implementation=implementation_name(function),
            origin=origin,
            source=source,
            tier=spec.tier,
            fallback=fallback,
            dtypes=tuple(dtype_name(dtype) for dtype in (spec.dtypes if claims.dtypes is None else claims.dtypes)),
            train="train" in spec.modes and claims.train is not False,
            graph_safe=spec.graph_safe and claims.graph_safe is not False,
        )

    def _counted(self, field: str, function: Function, lack: str = "") -> Function:
        """The function with a counter. lack: what the platform has not; reported at the first call."""
        calls = self.calls[field] = Calls()
        platform = self._platform.platform_name  # type: ignore[attr-defined]

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if lack and calls.count == 0:
                _log.warning(
                    "[op_fallback] Platform '%s' %s: it runs as %s, which is slower. `polyrec devices` lists all.",
                    platform,
                    lack,
                    self.rows[field].source,
                )
            calls.count += 1
            return function(*args, **kwargs)

        return counted


def implementation_name(function: Function) -> str:
    """`module:qualified name`, also of partials and callable objects."""
    if isinstance(function, functools.partial):
        return implementation_name(function.func)
    return f"{_module(function)}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def _module(function: Function) -> str:
    return getattr(function, "__module__", None) or type(function).__module__


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
