"""Settings: frozen, declared once beside the code that reads them, unknown keys refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import ConfigError, closest


class Settings(BaseModel):
    """Base of every settings class: frozen, keyword-only, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


S = TypeVar("S", bound=Settings)


def make_settings(cls: type[S], values: dict[str, Any], where: str = "settings") -> S:
    """Builds `cls` from a dictionary; every fault is reported at once, with the closest known name for unknown keys."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            name = ".".join(str(part) for part in fault["loc"])
            if fault["type"] == "extra_forbidden":
                faults.append(f"unknown key '{name}' ({closest(str(fault['loc'][-1]), _keys(cls, fault['loc'][:-1]))})")
            elif not name:  # a rule over several settings: its message names them
                faults.append(fault["msg"].removeprefix("Value error, "))
            else:
                faults.append(f"'{name}': {fault['msg'].removeprefix('Value error, ')}, got {fault.get('input')!r}")
        raise ConfigError("config_invalid", f"{where}: " + "; ".join(faults) + ".", "Correct these keys.") from error


def _keys(cls: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys of the settings that `path` leads to."""
    for name in path:
        inner = cls.model_fields[name].annotation if isinstance(name, str) and name in cls.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        cls = inner
    return list(cls.model_fields)


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Reads a YAML (or JSON) mapping from a file."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError("config_missing", f"No config file at {path}.", "Check the path given to --config.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("config_unreadable", f"{path} is not valid YAML: {error}.", "Mend the file.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("config_unreadable", f"{path} must hold keys and values, got {type(values).__name__}.")
    return values
