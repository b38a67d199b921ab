"""Files that are either whole or absent: written beside their place under a temporary name, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ConfigError


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path with the same suffix; on success it becomes `path`, on any error nothing is left."""
    path = Path(path)
    prepare_file(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yields a temporary folder; on success it replaces `path` (an existing folder goes), on any error nothing is left."""
    path = Path(path)
    make_parent(path)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            outgoing = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            os.replace(path, outgoing / path.name)
            os.replace(temporary, path)
            shutil.rmtree(outgoing)
        else:
            os.replace(temporary, path)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def prepare_file(path: Path) -> None:
    """`make_parent` for a file; a folder of that name, which no file can replace, is a ConfigError."""
    make_parent(path)
    if path.is_dir():
        raise ConfigError(
            "path_unusable", f"{path} cannot be written: it is a folder.", "Name a file, in it or elsewhere."
        )


def make_parent(path: Path) -> None:
    """Makes the folder that `path` shall stand in; a file in the way is a ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(
            "path_unusable",
            f"{path} cannot be written: {error.strerror} ({error.filename}).",
            "Name another path; a file cannot hold others.",
        ) from error


def write_json(path: str | Path, value: Any) -> None:
    """Writes JSON, indented, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Reads JSON; a broken file is a ConfigError that names the line."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("json_invalid", f"{path} is not valid JSON: {error}.", "Mend or remake the file.") from error


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file's content, hex."""
    with open(path, "rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def value_digest(value: Any) -> str:
    """SHA-256 of a JSON-able value with sorted keys, hex: the same value, the same digest."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
