"""The plugin that `polyrec plugins new` writes: its names, and the files in `skeleton/` with those names filled in."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from string import Template

from .. import __version__
from ..core.errors import ConfigError
from ..core.files import atomic_folder
from ..hardware.plugin.declare import API_VERSION

TEMPLATES = Path(__file__).parent / "skeleton"
SUFFIX = ".txt"  # so that neither Python's tools nor a wheel's installer take a template for source
PACKAGE = "package"  # the folder that gets the package's name
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")


@dataclass(frozen=True)
class Skeleton:
    """name: the distribution's. Errors: `plugin_name_invalid`, `plugin_name_taken`."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or keyword.iskeyword(self.package):
            raise ConfigError(
                "plugin_name_invalid",
                f"'{self.name}' cannot name a distribution and its package.",
                "Use lower-case letters and digits, with single hyphens between words, as in my-plugin.",
            )
        if self.package in sys.stdlib_module_names or importlib.util.find_spec(self.package) is not None:
            raise self._taken(f"A package named '{self.package}'")
        if any(True for _ in Distribution.discover(name=self.name)):
            raise self._taken(f"A distribution named '{self.name}'")

    def _taken(self, what: str) -> ConfigError:
        return ConfigError(
            "plugin_name_taken",
            f"{what} is there already, and '{self.name}' would hide it, replace it or be hidden.",
            "Choose another name.",
        )

    @property
    def package(self) -> str:
        """What is imported."""
        return self.name.replace("-", "_")

    @property
    def ops_entry(self) -> str:
        """What --extra-ops takes."""
        return f"{self.package}_ops"

    @property
    def att_entry(self) -> str:
        """What --extra-att takes."""
        return f"{self.package}_att"

    def words(self) -> dict[str, str]:
        """What stands for the templates' `$names`."""
        major = int(API_VERSION.partition(".")[0])
        return {
            "name": self.name,
            "package": self.package,
            "ops_entry": self.ops_entry,
            "att_entry": self.att_entry,
            "attention": f"{self.package}_attention",
            "polyrec_version": __version__,
            "api_range": f">={API_VERSION},<{major + 1}",
        }


def write_skeleton(skeleton: Skeleton, folder: Path) -> None:
    """Writes the distribution, whole or not at all; a folder that exists is `out_occupied`."""
    if folder.exists() or folder.is_symlink():
        raise ConfigError("out_occupied", f"{folder} exists.", "Name a folder that does not, with --out.")
    words = skeleton.words()
    with atomic_folder(folder) as temporary:
        for template in TEMPLATES.rglob(f"*{SUFFIX}"):
            first, *rest = template.relative_to(TEMPLATES).with_suffix("").parts
            path = temporary.joinpath(skeleton.package if first == PACKAGE else first, *rest)
            path.parent.mkdir(exist_ok=True)
            path.write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
