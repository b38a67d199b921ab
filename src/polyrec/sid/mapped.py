"""A file of named arrays that are mapped, not read, and that says of which source file it was made. No torch.

Layout: 8 bytes MAGIC, 8 bytes length of the header (little-endian), the header as JSON, then each array at a multiple of 64
bytes. Who maps it gets private pages: the arrays can be written to, the file never changes.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.files import atomic_path, file_digest

MAGIC = b"PLYRMAP5"  # its number changes with what the catalog keeps: files of another one are made anew
_ALIGN = 64


def write_arrays(path: str | Path, arrays: Mapping[str, np.ndarray], source: str | Path) -> None:
    """Writes the arrays as made from `source`, atomically. Errors: OSError."""
    facts, place = {}, 0
    for name, array in arrays.items():
        facts[name] = {"dtype": array.dtype.str, "shape": list(array.shape), "place": place}
        place = _aligned(place + array.nbytes)
    state = Path(source).stat()
    origin = {"size": state.st_size, "mtime_ns": state.st_mtime_ns, "digest": file_digest(source)}
    header = json.dumps({"source": origin, "arrays": facts, "bytes": place}).encode()
    with atomic_path(path) as temporary, open(temporary, "wb") as stream:
        stream.write(MAGIC + len(header).to_bytes(8, "little") + header)
        begin = _aligned(stream.tell())
        for name, array in arrays.items():
            stream.seek(begin + facts[name]["place"])
            stream.write(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
        stream.truncate(begin + place)


def map_arrays(path: str | Path, source: str | Path) -> dict[str, np.ndarray] | None:
    """The arrays of a file that was made from `source` as it is now; None when there is no such file, or it is stale or cut.

    A source of the same size but another time, as a copied folder has, is compared by its digest.
    """
    path = Path(path)
    if not path.is_file():
        return None
    with open(path, "rb") as stream:
        start = stream.read(16)
        if start[:8] != MAGIC:
            return None
        header = _header(stream.read(int.from_bytes(start[8:], "little")))
        begin = _aligned(stream.tell())
        if header is None or begin + header["bytes"] != path.stat().st_size or _is_stale(header["source"], source):
            return None
        whole = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    arrays = {}
    for name, fact in header["arrays"].items():
        dtype, shape = np.dtype(fact["dtype"]), fact["shape"]
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(whole, dtype, count, begin + fact["place"]).reshape(shape)
    return arrays


def _header(text: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(text)
    except ValueError:  # cut off, or not UTF-8
        return None


def _is_stale(origin: dict[str, Any], source: str | Path) -> bool:
    state = Path(source).stat()
    if state.st_size != origin["size"]:
        return True
    return state.st_mtime_ns != origin["mtime_ns"] and file_digest(source) != origin["digest"]


def _aligned(place: int) -> int:
    return -(-place // _ALIGN) * _ALIGN
