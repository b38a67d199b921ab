"""What the hardware layer costs: at start (scan, check, quick conformance), and at every call of an operation.

Start: fresh processes import torch, then build the backend, with and without the example plugin's operation and attention.
Call: a function that does nothing is called directly and through the table, as a built-in field, as a plugin's and as a
fallback (both are counted); the difference is what the table adds to every operation.

    python benchmarks/hardware_layer.py          # half a minute; writes benchmarks/results/hardware_layer.json
    python benchmarks/hardware_layer.py --quick  # a look; writes nothing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from facts import ROOT, origin

START_LIMIT = 0.300  # seconds beyond importing torch
CALL_LIMIT = 1e-6  # seconds a call

EXAMPLE = ROOT / "examples" / "polyrec-example-plugin"
ENTRY_POINTS = """[polyrec.ops_plugin]
example_ops = polyrec_example_plugin.register:register_ops
[polyrec.att_plugin]
example_att = polyrec_example_plugin.register:register_att
"""

START = """
import json, sys, time
begin = time.perf_counter()
import torch
with_torch = time.perf_counter()
from polyrec.hardware import HardwareConfig, build_hardware_backend
imported = time.perf_counter()
backend = build_hardware_backend(HardwareConfig(hardware_platform="cpu", **json.loads(sys.argv[1])))
built = time.perf_counter()
plugin = [row.field for row in backend.table.rows if row.origin == "plugin"]
print(json.dumps({"torch": with_torch - begin, "import": imported - with_torch, "build": built - imported, "plugin": plugin}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats, nothing written")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "hardware_layer.json")
    args = parser.parse_args()
    facts = origin("hardware_layer.py", packages=("torch",))
    repeats = 3 if args.quick else 15
    with tempfile.TemporaryDirectory() as folder:
        path = example_on_path(Path(folder))
        plugins = {"extra_ops": ["example_ops"], "extra_att": ["example_att"]}
        start = {
            "no plugin": start_cost({}, path, repeats),
            "example plugin, unchecked": start_cost({**plugins, "verify_plugins": "off"}, path, repeats),
            "example plugin, quick check": start_cost({**plugins, "verify_plugins": "quick"}, path, repeats),
        }
    calls = call_cost(50_000 if args.quick else 500_000)
    print("start, median of", repeats, "processes, beyond importing torch:")
    for name, cost in start.items():
        print(f"  {name:30} {1000 * cost['layer']:6.0f} ms (torch itself {1000 * cost['torch']:.0f} ms)")
    print("a call through the table, beyond the call itself:")
    for name, seconds in calls.items():
        print(f"  {name:30} {1e9 * seconds:6.0f} ns")
    met = max(cost["layer"] for cost in start.values()) <= START_LIMIT and max(calls.values()) < CALL_LIMIT
    print("limits met" if met else "LIMITS MISSED", f"({1000 * START_LIMIT:.0f} ms, {1e9 * CALL_LIMIT:.0f} ns)")
    if not args.quick:
        result = {"origin": facts, "start_seconds": start, "call_overhead_seconds": calls, "limits_met": met}
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return not met


def example_on_path(folder: Path) -> str:
    """A path on which the example plugin looks installed: its package, and the metadata that pip would write."""
    info = folder / "polyrec_example_plugin-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: polyrec-example-plugin\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return os.pathsep.join([str(folder), str(EXAMPLE)])


def start_cost(config: dict[str, Any], path: str, repeats: int) -> dict[str, float]:
    """Median seconds of importing torch, and of the layer beyond it."""
    runs = []
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-c", START, json.dumps(config)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        runs.append(json.loads(done.stdout))
        assert bool(runs[-1]["plugin"]) == bool(config), runs[-1]
    layer = statistics.median(run["import"] + run["build"] for run in runs)
    return {"torch": statistics.median(run["torch"] for run in runs), "layer": layer}


def call_cost(calls: int) -> dict[str, float]:
    """Seconds that the table adds to one call, by the kind of field."""
    from polyrec.hardware.backends.cpu import CpuBackend
    from polyrec.hardware.ops.spec import MISSING
    from polyrec.hardware.plugin.source import PluginSource
    from polyrec.hardware.table import Replacement, resolve

    def nothing(x: Any, weight: Any, eps: float) -> None:
        return None

    ops = CpuBackend().ops
    norm = replace(ops.norm, rms_norm=nothing)
    own = resolve(CpuBackend, replace(ops, norm=norm), {}, "allow", "infer").ops
    replacement = {"norm.rms_norm": Replacement(nothing, PluginSource("nothing", "benchmark", "0"))}
    plugin = resolve(CpuBackend, ops, replacement, "allow", "infer").ops
    spec_of_nothing = replace(norm, add_rms_norm=MISSING)
    falls_back = resolve(CpuBackend, replace(ops, norm=spec_of_nothing), {}, "allow", "infer")
    counted_fallback = falls_back.ops.norm.add_rms_norm
    bare_fallback = counted_fallback.__wrapped__  # type: ignore[attr-defined]

    x = weight = 0
    direct = best(lambda: [nothing(x, weight, 1e-6) for _ in range(calls)])
    return {
        "built-in": (best(lambda: [own.norm.rms_norm(x, weight, 1e-6) for _ in range(calls)]) - direct) / calls,
        "plugin": (best(lambda: [plugin.norm.rms_norm(x, weight, 1e-6) for _ in range(calls)]) - direct) / calls,
        "fallback": (
            best(lambda: [falls_back.ops.norm.add_rms_norm(0, 0, 0, 0.0) for _ in range(calls)])
            - best(lambda: [bare_fallback(0, 0, 0, 0.0) for _ in range(calls)])
        )
        / calls,
    }


def best(run: Callable[[], Any]) -> float:
    """The shortest of seven runs, in seconds: other work on the machine only lengthens one."""
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
