"""The way of a plugin: entry point, matched by name, declaration checked, modules imported, records merged. All or nothing.

Imports no torch until a plugin is asked for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

from ...core.errors import HardwareError, closest
from ..base.config import HardwareConfig
from .declare import Declared, check_declaration, read_declaration
from .records import Record, loading, records_of, reentrant
from .scan import Installed, Scan, scan_installed
from .source import FLAGS, GROUPS, KINDS, Kind, PluginError, PluginSource

if TYPE_CHECKING:
    from ..attention_choice import PluginAttention
    from ..table import Replacement

_log = logging.getLogger("polyrec.hardware")


@dataclass(frozen=True)
class Plugins:
    """What the plugins that were asked for put in the place of built-in fields, and add to the attention backends."""

    replacements: Mapping[str, Replacement]
    attention: Mapping[str, PluginAttention]


@dataclass(frozen=True)
class Loaded:
    """A plugin whose modules are imported, with what they registered in its group."""

    source: PluginSource
    records: tuple[Record, ...]


def configure_plugins(config: HardwareConfig, platform: str) -> Plugins:
    """Loads what `--extra-ops` and `--extra-att` name. Nothing asked: returns at once, and reads no metadata.

    Every plugin's declaration is checked before the first module of any is imported. Errors: all `plugin_…` codes,
    `pin_unused`, `attention_taken`, `attention_not_a_backend`.
    """
    if not (config.extra_ops or config.extra_att or config.op):
        return Plugins({}, {})
    declared = [*_declare_all(config, platform)] if config.extra_ops or config.extra_att else []
    loaded = [_load(plugin) for plugin in declared]
    from .att import attention_of
    from .ops import replacements_of

    return Plugins(
        replacements_of([plugin for plugin in loaded if plugin.source.kind == "ops"], config.op),
        attention_of([plugin for plugin in loaded if plugin.source.kind == "att"]),
    )


def _declare_all(config: HardwareConfig, platform: str) -> Iterator[Declared]:
    scan = scan_installed()
    asked: dict[Kind, tuple[str, ...]] = {"ops": config.extra_ops, "att": config.extra_att}
    matched = [_match(scan, kind, name) for kind in KINDS for name in dict.fromkeys(asked[kind])]
    for installed in matched:
        declared = _declare(installed)
        check_declaration(declared, platform)
        yield declared


def _match(scan: Scan, kind: Kind, name: str) -> Installed:
    """The entry point of this very name. Errors: `plugin_unknown`, `plugin_name_duplicate`."""
    hidden = [item for item in scan.hidden if (item.installed.source.kind, item.installed.source.name) == (kind, name)]
    for item in hidden:
        _log.warning("[plugin_metadata_stale] Plugin %s. Uninstall the one that is out of date.", item)
    of_kind = scan.of_kind(kind)
    matching = [item for item in of_kind if item.source.name == name]
    if len(matching) > 1:
        raise HardwareError(
            "plugin_name_duplicate",
            f"{FLAGS[kind]} {name} is claimed {len(matching)} times: "
            + " and ".join(f"by {item.source.distribution} {item.source.version} ({item.value})" for item in matching)
            + ".",
            "Uninstall one of them.",
        )
    if matching:
        return matching[0]
    other: Kind = "att" if kind == "ops" else "ops"
    elsewhere = [item for item in scan.of_kind(other) if item.source.name == name]
    known = ", ".join(str(item.source) for item in of_kind) or "none"
    remedy = closest(name, [item.source.name for item in of_kind])
    if elsewhere:
        remedy = f"'{elsewhere[0].source}' is in the other group, {GROUPS[other]}: use {FLAGS[other]} {name}."
    elif hidden:
        remedy = f"The plugin {hidden[0]}: uninstall the one that is out of date."
    elif not remedy.startswith("Did you mean"):
        remedy = "Install the distribution that has it into this environment, and see `polyrec plugins`."
    raise HardwareError(
        "plugin_unknown", f"No plugin of the group {GROUPS[kind]} is named '{name}'. Installed: {known}.", remedy
    )


def _declare(installed: Installed) -> Declared:
    """Imports the entry point's module and calls its function."""
    source = installed.source
    with _importing(source, None, f"its entry point {installed.value}"):
        function = EntryPoint(name=source.name, value=installed.value, group=GROUPS[source.kind]).load()
        value = function() if callable(function) else function
    return read_declaration(source, value)


def _load(declared: Declared) -> Loaded:
    """Imports a plugin's modules and takes what they registered. Errors: `plugin_import_failed`, `plugin_registers_nothing`."""
    source = declared.source
    for module in declared.modules:
        with _importing(source, module, f"its module {module}"):
            import_module(module)
    records = tuple(record for module in dict.fromkeys(declared.modules) for record in records_of(source.kind, module))
    if not records:
        how = {"ops": 'register_ops(norm={"rms_norm": f})', "att": '@register_att_backend("name")'}
        raise PluginError(
            "plugin_registers_nothing",
            source,
            f"registers nothing in its group: {', '.join(declared.modules)} made no call of {how[source.kind]}.",
            f"Call it when the module is imported, or leave out {source.flag}.",
        )
    return Loaded(source, records)


@contextmanager
def _importing(source: PluginSource, module: str | None, what: str) -> Iterator[None]:
    """What fails inside is `plugin_import_failed`, with the cause, unless the plugin's own fault was found already."""
    # Standard output belongs to the command, which may print JSON there.
    with redirect_stdout(sys.stderr), loading(source, module) as state:
        try:
            yield
        except PluginError:
            raise
        except (Exception, SystemExit) as error:  # a module that exits would end the command without a word
            lacking = getattr(error, "name", None) if isinstance(error, ImportError) else None
            raise PluginError(
                "plugin_import_failed",
                source,
                f"could not be loaded: {what} raised {type(error).__name__}: {error}.",
                (f"Install what '{lacking}' belongs to" if lacking else f"Update {source.distribution}")
                + f", or leave out {source.flag}.",
            ) from error
        if state.entered:  # the module caught the refusal
            raise reentrant(state)
