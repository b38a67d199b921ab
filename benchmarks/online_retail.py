"""The demo over several seeds: does the model reach basket itemKNN's interval, how long does it take, how much memory?

    python benchmarks/online_retail.py --work runs/online_retail

Runs `polyrec demo` once a seed, each in a process of its own; finished seeds are reused, with the time they took then.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from facts import origin

from polyrec.core.files import read_json, write_json

METRICS = ("NDCG@5", "NDCG@10", "HR@5", "HR@10", "Recall@10")


def run_seed(folder: Path, seed: int) -> dict[str, Any]:
    """One demo: wall-clock seconds and peak resident bytes of its process, and its origin, kept beside what it made."""
    mark = folder / "cost.json"
    if not mark.is_file():
        facts = origin("online_retail.py")
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "polyrec.cli.main", "demo", "--out", folder, "--seed", str(seed)]
        )
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"the demo with seed {seed} ended with status {os.waitstatus_to_exitcode(status)}")
        cost = {**facts, "seconds": time.perf_counter() - started, "peak_bytes": usage.ru_maxrss * 1024}
        write_json(mark, cost)
    return read_json(mark)


def summary(results: list[dict[str, Any]], protocol: str) -> dict[str, Any]:
    """Means over seeds of the model's metrics, each seed's, and the baselines' with their intervals."""
    methods = [result["protocols"][protocol]["methods"] for result in results]
    per_seed = {name: [one["Polyrec"]["metrics"][name]["mean"] for one in methods] for name in METRICS}
    return {
        "Polyrec": {name: {"mean": statistics.mean(values), "seeds": values} for name, values in per_seed.items()},
        "Polyrec rates": [one["Polyrec"]["rates"] for one in methods],
        **{name: {m: one["metrics"][m] for m in METRICS} for name, one in methods[0].items() if name != "Polyrec"},
    }


def main() -> None:
    """Runs the seeds, prints NDCG@10, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for what the demos make")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "online_retail.json")
    options = parser.parse_args()
    costs = [run_seed(options.work / f"seed-{seed}", seed) for seed in options.seeds]
    results = [read_json(options.work / f"seed-{seed}" / "evaluation" / "evaluation.json") for seed in options.seeds]
    protocols = {name: summary(results, name) for name in ("new", "all")}
    for name, methods in protocols.items():
        model = methods["Polyrec"]["NDCG@10"]
        knn = methods["basket itemKNN"]["NDCG@10"]
        print(
            f"{name}: Polyrec NDCG@10 {model['mean']:.4f} ({', '.join(f'{value:.4f}' for value in model['seeds'])}), "
            f"basket itemKNN {knn['mean']:.4f} ({knn['low']:.4f} to {knn['high']:.4f})"
        )
    write_json(options.out, {"seeds": options.seeds, "runs": costs, "protocols": protocols})


if __name__ == "__main__":
    main()
