"""What a measurement says: where it was made, latencies in percentiles, a table for people. No torch."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__

COMMIT_VARIABLE = "POLYREC_COMMIT"  # the commit, for a copy of the sources without its repository


def origin(device: str | None = None, packages: Sequence[str] = ("torch", "numpy", "triton")) -> dict[str, Any]:
    """date (UTC), version, commit, command and machine of a run that starts now. device: its name, where one is used."""
    words = [word if not Path(word).is_absolute() else Path(word).name for word in sys.argv[1:]]
    versions = {name: _version(name) for name in packages}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "polyrec": __version__,
        "commit": commit(),
        "command": shlex.join(["polyrec", *words]),
        "machine": {
            "processor": _cpu_name(),
            "cores": os.cpu_count(),
            "load_average": list(os.getloadavg()),
            "device": device,
            "versions": {"python": platform.python_version(), **{k: v for k, v in versions.items() if v}},
        },
    }


def commit() -> str | None:
    """The sources' commit, `+` added when files under src differ from it; None where nothing tells."""
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", "src") else "")


def summary(latencies: Sequence[float], seconds: float, num_requests: int | None = None) -> dict[str, float]:
    """Latencies in seconds -> p50, p90, p99, mean and max in ms, and the requests that `seconds` served, per second."""
    ms = np.asarray(latencies, np.float64) * 1e3
    count = len(ms) if num_requests is None else num_requests
    p50, p90, p99 = np.percentile(ms, [50, 90, 99])
    found = {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "mean_ms": ms.mean(), "max_ms": ms.max()}
    return {"requests": count, "requests_per_second": count / seconds, **{k: float(v) for k, v in found.items()}}


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Right-aligned columns, two blanks apart."""
    texts = [[str(column) for column in columns], *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[place]) for row in texts) for place in range(len(columns))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in texts)


def line(columns: Sequence[str], values: Sequence[Any]) -> str:
    """What a row of `table` says, in words of its own."""
    return ", ".join(
        f"{column} {text}" for column, value in zip(columns, values, strict=True) if (text := _cell(value))
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
    return "" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The processor's own name, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
