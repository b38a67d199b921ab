"""Operations from plugins: checked against their specification, then by their numbers; merged only when all are right."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch

from ...core.errors import HardwareError, closest
from ..base.backend import HardwareBackend
from ..base.config import HardwareConfig
from ..ops.check import CheckRaised, check_op
from ..ops.spec import Claims, Function, OpSpec, claims_of
from ..table import Replacement, all_specs, implementation_name
from .common import Loaded
from .records import Record, registered_twice
from .source import PluginError, PluginSource

_KINDS: dict[Any, str] = {
    inspect.Parameter.POSITIONAL_ONLY: "positional-only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional or by name",
    inspect.Parameter.KEYWORD_ONLY: "by name only",
}


def replacements_of(plugins: Sequence[Loaded], pins: Mapping[str, str]) -> dict[str, Replacement]:
    """Field -> what replaces it. pins: field -> plugin, from `--op`.

    Errors: `plugin_field_unknown`, `plugin_not_callable`, `plugin_signature`, `plugin_dtype`, `plugin_conflict`, `pin_unused`.
    """
    specs = all_specs()
    claimed: dict[str, list[Replacement]] = {}
    for plugin in plugins:
        for field, function in _fields_of(plugin).items():
            check_registered(plugin.source, field, function, specs)
            claimed.setdefault(field, []).append(Replacement(function, plugin.source))
    _check_pins(plugins, pins, claimed, specs)
    chosen = {field: _chosen(claims, pins.get(field)) for field, claims in claimed.items()}
    if torn := [field for field in claimed if len(chosen[field]) > 1]:
        raise HardwareError(
            "plugin_conflict",
            "More than one plugin registers "
            + "; ".join(f"'{field}': {' and '.join(str(one.source) for one in chosen[field])}" for field in torn)
            + ". The order of loading decides nothing.",
            "Choose: " + " ".join(f"--op {field}={chosen[field][0].source.name}" for field in torn) + ".",
        )
    return {field: claims[0] for field, claims in chosen.items()}


def check_registered(source: PluginSource, field: str, function: Function, specs: Mapping[str, OpSpec]) -> None:
    """What can be said of an operation without calling it."""
    if field not in specs:
        raise PluginError(
            "plugin_field_unknown",
            source,
            f"registers '{field}', which is no operation of this version of Polyrec.",
            f"{closest(field, specs)} `polyrec devices` lists all.",
        )
    spec = specs[field]
    if not callable(function):
        raise PluginError(
            "plugin_not_callable", source, f"registers {function!r} as '{field}'.", "Register a function."
        )
    if faults := signature_faults(function, spec.reference):
        raise PluginError(
            "plugin_signature",
            source,
            f"registers {implementation_name(function)} as '{field}': {'; '.join(faults)}. "
            f"Expected {_shown(spec.reference)}, found {_shown(function)}.",
            "Wrap it in a function with the expected parameters.",
        )
    _check_dtypes(source, field, claims_of(function), spec)


def verify_ops(replacements: Mapping[str, Replacement], backend: HardwareBackend, config: HardwareConfig) -> None:
    """Compares every replacement's numbers with its reference on the backend's device; `plugin_conformance` keeps the cause."""
    if config.verify_plugins == "off":
        return
    specs = all_specs()
    for field, replacement in replacements.items():
        try:
            with redirect_stdout(sys.stderr):  # standard output belongs to the command
                faults = check_op(
                    field,
                    specs[field],
                    replacement.function,
                    runtime=backend.runtime,
                    graph=backend.graph,
                    dtypes=backend.capabilities.dtypes,
                    train=config.purpose == "train",
                    level=config.verify_plugins,
                )
        except CheckRaised as error:
            cause = error.__cause__
            raise _nonconforming(replacement, field, f"{error} ({type(cause).__name__}: {cause})") from error
        if faults:
            raise _nonconforming(replacement, field, "; ".join(map(str, faults)))


def _fields_of(plugin: Loaded) -> dict[str, Function]:
    """Field -> function; the same function twice is one registration."""
    records: dict[str, Record] = {}
    for record in plugin.records:
        first = records.setdefault(record.key, record)
        if first.value is not record.value:
            raise registered_twice(plugin.source, first, record)
    return {field: record.value for field, record in records.items()}


def _chosen(claims: list[Replacement], pin: str | None) -> list[Replacement]:
    return claims if pin is None else [claim for claim in claims if claim.source.name == pin]


def _check_pins(
    plugins: Sequence[Loaded],
    pins: Mapping[str, str],
    claimed: Mapping[str, list[Replacement]],
    specs: Mapping[str, OpSpec],
) -> None:
    names = [plugin.source.name for plugin in plugins]
    for field, name in pins.items():
        claims = claimed.get(field, [])
        if any(claim.source.name == name for claim in claims):
            continue
        if field not in specs:
            why, remedy = f"'{field}' is no operation", closest(field, specs)
        elif name not in names:
            loaded = ", ".join(str(plugin.source) for plugin in plugins) or "none"
            why, remedy = f"'{name}' is not loaded (loaded: {loaded})", f"Add --extra-ops {name}, or leave the pin out."
        else:
            source = next(plugin.source for plugin in plugins if plugin.source.name == name)
            others = ", ".join(str(claim.source) for claim in claims) or "no loaded plugin does"
            why, remedy = (
                f"{source} does not register '{field}' ({others})",
                "Leave the pin out, or name another plugin.",
            )
        raise HardwareError("pin_unused", f"--op {field}={name} has no effect: {why}.", remedy)


def signature_faults(function: Function, reference: Function) -> list[str]:
    """How the parameters differ: names, order, kinds, defaults; more parameters are allowed if they have defaults."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return ["its parameters cannot be read, as with functions that are written in C"]
    expected = list(inspect.signature(reference).parameters.values())
    variadic = [one for one in found if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if variadic:
        return [f"'{one}' hides which parameters it takes" for one in variadic]
    faults = []
    named = {one.name: one for one in found}
    names, wanted = [one.name for one in found], [one.name for one in expected]
    if missing := [name for name in wanted if name not in named]:
        faults.append(f"it has no {', '.join(missing)}")
    elif names[: len(wanted)] != wanted:
        faults.append(f"its parameters are in another order: {', '.join(names)}")
    for one in found:
        if one.name not in wanted and one.default is one.empty:
            faults.append(f"'{one.name}' is one more and has no default")
    for want in expected:
        have = named.get(want.name, want)
        if have.kind != want.kind:
            faults.append(f"'{want.name}' is {_KINDS[have.kind]}, and must be {_KINDS[want.kind]}")
        if have.default is not want.default and have.default != want.default:
            faults.append(f"'{want.name}' has the default {_default(have)}, and must have {_default(want)}")
    return faults


def _default(parameter: inspect.Parameter) -> str:
    return "none" if parameter.default is parameter.empty else repr(parameter.default)


def _shown(function: Function) -> str:
    """A signature without annotations, for messages."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return "(unreadable)"
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in parameters]
    return str(inspect.Signature(bare))


def _check_dtypes(source: PluginSource, field: str, claims: Claims, spec: OpSpec) -> None:
    if claims.dtypes is None:
        return
    known = isinstance(claims.dtypes, tuple) and all(isinstance(dtype, torch.dtype) for dtype in claims.dtypes)
    if known and claims.dtypes and set(claims.dtypes) <= set(spec.dtypes):
        return
    raise PluginError(
        "plugin_dtype",
        source,
        f"claims {claims.dtypes!r} for '{field}', which is specified for {', '.join(map(str, spec.dtypes))}.",
        "Claim some of these in op_claims(dtypes=(…,)), or claim nothing if it takes all.",
    )


def _nonconforming(replacement: Replacement, field: str, faults: str) -> PluginError:
    return PluginError(
        "plugin_conformance",
        replacement.source,
        f"computes '{field}' ({implementation_name(replacement.function)}) otherwise than specified: {faults}.",
        f"Leave out {replacement.source.flag}, or install a version that conforms. "
        "polyrec.testing.conformance runs the same checks.",
    )
