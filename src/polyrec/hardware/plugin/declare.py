"""What a plugin's entry point returns, and whether it is for this platform, this API and these packages. No torch.

All of it is checked before any of the plugin's modules is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from .source import PluginError, PluginSource

API_VERSION = (
    "1.0"  # of polyrec.plugin_api: the second number grows with what it gains, the first when a plugin must change
)


@dataclass(frozen=True)
class Plugin:
    """What an entry point's function may return instead of module names.

    modules: imported in this order. platforms: names of those it is for; None: any. api: the versions of polyrec.plugin_api
    it works with, as `>=1.0,<2`; empty: any. requires: other distributions it needs, as pip writes them: `torch>=2.9`.
    """

    modules: tuple[str, ...] | list[str] | str
    platforms: tuple[str, ...] | list[str] | str | None = None
    api: str = ""
    requires: tuple[str, ...] | list[str] | str = ()


@dataclass(frozen=True)
class Declared:
    """A returned value in one form."""

    source: PluginSource
    modules: tuple[str, ...]
    platforms: tuple[str, ...] | None
    api: SpecifierSet
    requires: tuple[Requirement, ...]


def read_declaration(source: PluginSource, value: Any) -> Declared:
    """Error: `plugin_return_invalid`."""
    plugin = value if isinstance(value, Plugin) else Plugin(value)
    modules = _texts(plugin.modules)
    if not modules or not all(all(part.isidentifier() for part in name.split(".")) for name in modules):
        raise _invalid(source, f"{value!r}, which is neither module names nor a Plugin")
    platforms = None if plugin.platforms is None else _texts(plugin.platforms)
    if platforms == ():
        raise _invalid(source, f"platforms={plugin.platforms!r}, which is neither None nor names of platforms")
    requires = _texts(plugin.requires)
    if requires is None or not isinstance(plugin.api, str):
        raise _invalid(source, f"api={plugin.api!r} and requires={plugin.requires!r}, which must be texts")
    try:
        return Declared(
            source, modules, platforms, SpecifierSet(plugin.api), tuple(Requirement(text) for text in requires)
        )
    except (InvalidSpecifier, InvalidRequirement) as error:
        raise _invalid(source, f"a version range or requirement that cannot be read ({error})") from error


def check_declaration(declared: Declared, platform: str) -> None:
    """Errors: `plugin_platform`, `plugin_api_range`, `plugin_requirement`."""
    source = declared.source
    if declared.platforms is not None and platform not in declared.platforms:
        raise PluginError(
            "plugin_platform",
            source,
            f"is for {', '.join(declared.platforms)}, and the platform is '{platform}'.",
            f"Leave out {source.flag}, or choose another platform (--hardware-platform).",
        )
    if not declared.api.contains(API_VERSION, prereleases=True):
        raise PluginError(
            "plugin_api_range",
            source,
            f"works with polyrec.plugin_api {declared.api}, and this is {API_VERSION}.",
            f"Install a version of {source.distribution} that is for {API_VERSION}, or another version of polyrec.",
        )
    unmet = [fault for requirement in declared.requires for fault in _unmet(requirement)]
    if unmet:
        raise PluginError(
            "plugin_requirement",
            source,
            f"needs {'; '.join(unmet)}.",
            "Install: pip install " + " ".join(f"'{requirement}'" for requirement in declared.requires) + ".",
        )


def _unmet(requirement: Requirement, extra: str = "") -> Iterator[str]:
    """What of a requirement, and of what its extras bring along, is not installed."""
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
        return
    try:
        found = distribution(requirement.name)
    except PackageNotFoundError:
        yield f"{requirement.name}{requirement.specifier}, which is not installed"
        return
    if requirement.specifier and not _within(found, requirement.specifier):
        yield f"{requirement.name}{requirement.specifier}, and {found.version or 'an unknown version'} is installed"
    for wanted in sorted(requirement.extras):
        for brought in map(Requirement, found.requires or ()):
            if brought.marker is not None and not brought.marker.evaluate({"extra": ""}):
                yield from _unmet(brought, wanted)


def _within(found: Distribution, specifier: SpecifierSet) -> bool:
    """Not so either for a version that is none, as of metadata that a half-done removal left behind."""
    try:
        return specifier.contains(Version(found.version or ""), prereleases=True)
    except InvalidVersion:
        return False


def _texts(value: Any) -> tuple[str, ...] | None:
    """One text or several as a tuple; None if it is anything else."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value):
        return tuple(value)
    return None


def _invalid(source: PluginSource, what: str) -> PluginError:
    return PluginError(
        "plugin_return_invalid",
        source,
        f"has an entry point that returns {what}.",
        'Return ["package.module"], or polyrec.plugin_api.Plugin(modules=["package.module"]).',
    )
