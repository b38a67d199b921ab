"""What is installed and what each plugin would register, for `polyrec plugins`: read, not imported. No torch.

Texts are found where they are literal; what is not is reported as decided when it runs.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import HardwareError
from .declare import Declared, Plugin, check_declaration, read_declaration
from .scan import Installed, scan_installed
from .source import GROUPS, KINDS, Kind
from .sources import Source, SourceFault, at_import, literal, read_source

UNKNOWN = "unknown: decided when it runs"
_REGISTER = {"ops": "register_ops", "att": "register_att_backend"}


@dataclass(frozen=True)
class Registration:
    """key: `group.field`, an attention name, or UNKNOWN. implementation: the expression. conditional: in a branch or loop."""

    key: str
    implementation: str
    module: str
    line: int
    conditional: bool


@dataclass(frozen=True)
class PluginReport:
    """One entry point. modules, platforms, api, requires: as its function returns them; modules None: UNKNOWN.

    platforms None: any. registers: what its modules' text says. faults: why loading it would fail, as far as can be seen.
    """

    kind: Kind
    group: str
    name: str
    distribution: str
    version: str
    entry_point: str
    location: str
    modules: tuple[str, ...] | None
    platforms: tuple[str, ...] | None
    api: str
    requires: tuple[str, ...]
    registers: tuple[Registration, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True)
class PluginsReport:
    """plugins: by group, then name. faults: of the environment: hidden distributions, lines that are no entry points."""

    plugins: tuple[PluginReport, ...]
    faults: tuple[str, ...]


@dataclass
class _Found:
    """What reading one plugin gave so far."""

    declared: Declared | None = None
    registers: list[Registration] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def inspect_plugins() -> PluginsReport:
    """Reads metadata and sources of everything installed in our groups."""
    scan = scan_installed()
    names = Counter((item.source.kind, item.source.name) for item in scan.found)
    reports = []
    for kind in KINDS:
        for item in scan.of_kind(kind):
            report = _inspect(item)
            if names[kind, item.source.name] > 1:
                fault = f"plugin_name_duplicate: the name is claimed {names[kind, item.source.name]} times"
                report = dataclasses.replace(report, faults=(fault, *report.faults))
            reports.append(report)
    stale = [f"plugin_metadata_stale: plugin {hidden}" for hidden in scan.hidden]
    return PluginsReport(
        tuple(reports), (*stale, *(f"entry point that cannot be read: {text}" for text in scan.malformed))
    )


def _inspect(item: Installed) -> PluginReport:
    found = _Found()
    try:
        _read_declared(item, found)
        modules = found.declared.modules if found.declared else ()
        seen: set[str] = set()
        for module in modules:
            found.registers += _registrations(item.source.kind, module, seen)
    except SourceFault as error:
        found.faults.append(f"plugin_import_failed: {error}")
    declared, source = found.declared, item.source
    if declared and not found.registers and not found.faults:
        found.faults.append(
            f"plugin_registers_nothing: no call of {_REGISTER[source.kind]} in {', '.join(declared.modules)}"
        )
    return PluginReport(
        kind=source.kind,
        group=GROUPS[source.kind],
        name=source.name,
        distribution=source.distribution,
        version=source.version,
        entry_point=item.value,
        location=item.location,
        modules=declared.modules if declared else None,
        platforms=declared.platforms if declared else None,
        api=str(declared.api) if declared else "",
        requires=tuple(map(str, declared.requires)) if declared else (),
        registers=tuple(found.registers),
        faults=tuple(found.faults),
    )


def _read_declared(item: Installed, found: _Found) -> None:
    """What the entry point's function returns, where that is one literal, and whether it is for these packages."""
    defined = _function(item.module, item.value.partition(":")[2].strip())
    if defined is None:
        return
    function, source = defined
    returns = [(node.value, certain) for node, certain in at_import(function.body) if isinstance(node, ast.Return)]
    plugin = _plugin(returns[0][0], source) if len(returns) == 1 and returns[0][1] else None
    if plugin is None:
        return
    try:
        found.declared = read_declaration(item.source, plugin)
        check_declaration(dataclasses.replace(found.declared, platforms=None), platform="")
    except HardwareError as error:
        found.faults.append(f"{error.code}: {error}")


def _function(module: str, name: str, hops: int = 4) -> tuple[ast.FunctionDef, Source] | None:
    """A function's definition, through `from x import name` if need be; None: something else gives the name, when it runs."""
    source = read_source(module)
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node, source
    if name in source.imported and hops:
        return _function(*source.imported[name], hops - 1)
    if source.may_bind(name):
        return None
    raise SourceFault(f"'{module}' defines no function '{name}'")


def _plugin(node: ast.expr | None, source: Source) -> Plugin | None:
    """A returned expression as a declaration; None: it is decided when it runs."""
    if node is None:
        return None
    fields = [one.name for one in dataclasses.fields(Plugin)]
    given: dict[str, ast.expr] = {"modules": node}
    if isinstance(node, ast.Call) and source.original(node.func) == Plugin.__name__:
        if len(node.args) > len(fields) or any(one.arg not in fields for one in node.keywords):
            return None
        given = {**dict(zip(fields, node.args, strict=False)), **{str(one.arg): one.value for one in node.keywords}}
    nothing = [name for name, value in given.items() if isinstance(value, ast.Constant) and value.value is None]
    values: dict[str, Any] = {
        name: literal(value, source.names) for name, value in given.items() if name not in nothing
    }
    return None if None in values.values() or "modules" not in values else Plugin(**values)


def _registrations(kind: Kind, module: str, seen: set[str]) -> Iterator[Registration]:
    """What a module's text registers when it is imported, with the modules of its package that it imports."""
    if module in seen:
        return
    seen.add(module)
    source = read_source(module)
    for node, certain in at_import(source.tree.body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for inner in _own_modules(node, source):
                for registration in _registrations(kind, inner, seen):
                    yield dataclasses.replace(registration, conditional=registration.conditional or not certain)
        elif isinstance(node, ast.Call) and source.original(node.func) == _REGISTER[kind]:
            yield from _ops(node, source, certain) if kind == "ops" else _attention(node, source, certain)
    at_top = {id(node) for node, _ in at_import(source.tree.body)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and id(node) not in at_top and source.original(node.func) == _REGISTER[kind]:
            yield Registration(UNKNOWN, "called inside a function", source.name, node.lineno, True)


def _own_modules(node: ast.Import | ast.ImportFrom, source: Source) -> Iterator[str]:
    """Modules of the same top-level package that an import loads and that have a source."""
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = source.absolute(node) or ""
        names = [base, *(f"{base}.{name}" for name in names)]
    for name in names:
        if name.split(".")[0] != source.name.split(".")[0]:
            continue
        try:
            read_source(name)
        except SourceFault:
            continue  # an attribute, or compiled
        yield name


def _ops(call: ast.Call, source: Source, certain: bool) -> Iterator[Registration]:
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg is None or not isinstance(value, ast.Dict):
            yield Registration(UNKNOWN, ast.unparse(value), source.name, call.lineno, not certain)
            continue
        for key, function in zip(value.keys, value.values, strict=True):
            name = None if key is None else literal(key, source.names)
            shown = f"{keyword.arg}.{name}" if isinstance(name, str) else UNKNOWN
            yield Registration(shown, ast.unparse(function), source.name, function.lineno, not certain)


def _attention(call: ast.Call, source: Source, certain: bool) -> Iterator[Registration]:
    """The call makes the decorator; what it decorates is the class below, or the argument of the call around it."""
    name = literal(call.args[0], source.names) if len(call.args) == 1 else None
    implementation = UNKNOWN
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and call in node.decorator_list:
            implementation = node.name
        elif isinstance(node, ast.Call) and node.func is call and node.args:
            implementation = ast.unparse(node.args[0])
    yield Registration(
        name if isinstance(name, str) else UNKNOWN, implementation, source.name, call.lineno, not certain
    )
