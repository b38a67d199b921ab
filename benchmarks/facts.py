"""What every measured result says of its origin: date, commit, command, machine, versions."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from polyrec.bench.report import commit

ROOT = Path(__file__).parent.parent


def origin(script: str, *, packages: tuple[str, ...] = ("torch", "numpy")) -> dict[str, Any]:
    """date (UTC), commit, command and machine of a run that starts now; packages: whose versions count.

    Where the data lie is left out of the command: it says nothing to others.
    """
    words = [word if not Path(word).is_absolute() else "PATH" for word in sys.argv[1:]]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join([f"python benchmarks/{script}", *words]),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        },
    }


def cpu_name() -> str:
    """The processor's own name, where the system tells."""
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in names if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
