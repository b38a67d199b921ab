"""Which plugins are installed, read from the metadata of distributions. Imports no plugin, and no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions

from .source import GROUPS, Kind, PluginSource

_MARK = "polyrec."  # an entry_points.txt without it is none of ours, and is not read further


@dataclass(frozen=True)
class Installed:
    """One entry point. value: `module:function`. location: the folder on the path that holds its metadata."""

    source: PluginSource
    value: str
    location: str

    @property
    def module(self) -> str:
        """The module that the entry point names."""
        return self.value.partition(":")[0].strip()


@dataclass(frozen=True)
class Hidden:
    """An entry point that Python does not see, since `version` at `location` bears the same name and comes first."""

    installed: Installed
    version: str
    location: str

    def __str__(self) -> str:
        source = self.installed.source
        return (
            f"'{source.name}' of {source.distribution} {source.version} (in {self.installed.location}) is hidden by metadata "
            f"of {source.distribution} {self.version} (in {self.location}), which comes first and does not have it"
        )


@dataclass(frozen=True)
class Scan:
    """found: usable entry points. hidden: those behind other metadata. malformed: lines that are none, with their place."""

    found: tuple[Installed, ...]
    hidden: tuple[Hidden, ...]
    malformed: tuple[str, ...]

    def of_kind(self, kind: Kind) -> list[Installed]:
        """The entry points of one group, by name."""
        return sorted((item for item in self.found if item.source.kind == kind), key=lambda item: item.source.name)


def scan_installed() -> Scan:
    """Reads every distribution on the path; of several with one name the first counts, as for Python itself."""
    found: dict[Installed, None] = {}
    hidden: list[Hidden] = []
    malformed: list[str] = []
    for distribution in distributions():
        text = _read(distribution, "entry_points.txt", malformed)
        if _MARK not in text:
            continue
        own = list(_entries(distribution, text, malformed))
        first = _first_of_name(distribution)
        seen = own if first is None else list(_entries(first, _read(first, "entry_points.txt", []), []))
        visible = {(item.source.kind, item.source.name, item.value) for item in seen}
        for item in own:
            if first is None:
                found[item] = None
            elif (item.source.kind, item.source.name, item.value) not in visible:
                hidden.append(Hidden(item, _version(first), _location(first)))
    return Scan(tuple(found), tuple(hidden), tuple(malformed))


def _read(distribution: Distribution, file: str, malformed: list[str]) -> str:
    """A file of the metadata; what is no UTF-8 hides this distribution's entry points, and no other's."""
    try:
        return distribution.read_text(file) or ""
    except UnicodeDecodeError as error:
        malformed.append(
            f"{_name(distribution)} {_version(distribution)} in {_location(distribution)}, {file}: {error}"
        )
        return ""


def _entries(distribution: Distribution, text: str, malformed: list[str]) -> Iterator[Installed]:
    """The entry points of our groups in an entry_points.txt."""
    kinds = {group: kind for kind, group in GROUPS.items()}
    section = ""
    for line in (raw.strip() for raw in text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif section in kinds and line and not line.startswith(("#", ";")):
            name, equals, value = (part.strip() for part in line.partition("="))
            if name and equals and value:
                source = PluginSource(name, _name(distribution), _version(distribution), kinds[section])
                yield Installed(source, value.partition("[")[0].strip(), _location(distribution))
            else:
                malformed.append(f"{_name(distribution)} {_version(distribution)}, [{section}]: {line!r}")


def _first_of_name(distribution: Distribution) -> Distribution | None:
    """The distribution that hides this one; None if this is the one that Python sees."""
    name = _field(distribution, "Name")
    if not name:
        return None
    first = next(iter(Distribution.discover(name=name)), distribution)
    return None if _identity(first) == _identity(distribution) else first


def _identity(distribution: Distribution) -> tuple[str, str, str]:
    return (_location(distribution), _version(distribution), normalised(_name(distribution)))


def normalised(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(distribution: Distribution) -> str:
    return _field(distribution, "Name") or "(a distribution without a name)"


def _version(distribution: Distribution) -> str:
    return _field(distribution, "Version") or "(no version)"


def _field(distribution: Distribution, name: str) -> str:
    """Of METADATA; empty where it cannot be read."""
    try:
        return distribution.metadata[name] or ""
    except UnicodeDecodeError:
        return ""


def _location(distribution: Distribution) -> str:
    return str(distribution.locate_file(""))
