"""The same cases by several copies of the sources, in turn, in one run: leases and hours differ by more than most changes gain.

Each round runs `polyrec bench MODE` once with every copy (`git worktree add /tmp/before HEAD~1` makes one); what counts is each
copy's best round, beside the first copy's. What follows -- goes to the command: flags of the model for offline, or after a
second -- those of the server for serve.

    python benchmarks/side_by_side.py /tmp/before . --model /tmp/onerec --case 1000:256:1:90 -- --quantization fp8
    python benchmarks/side_by_side.py /tmp/before . --model /tmp/onerec --mode serve --case 1000:256:1 -- -- --quantization fp8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from polyrec.bench.report import table
from polyrec.core.files import write_json


def run(tree: Path, mode: str, model: Path, cases: list[str], options: list[str]) -> dict[str, Any]:
    """The JSON of `polyrec bench` as that copy of the sources has it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = [word for case in cases for word in ("--case", case)]
        command = [sys.executable, "-m", "polyrec.cli.main", "bench", mode, model, *words, "--out", out, *options]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run([*map(str, command)], env=environment, cwd=tree, stdout=subprocess.DEVNULL)
        if not out.is_file():
            sys.exit(f"{tree}: the bench ended with status {done.returncode} and wrote nothing.")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=Path, help="Checkouts; the others are set beside the first.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mode", choices=("offline", "serve"), default="offline")
    parser.add_argument("--case", action="append", required=True, dest="cases")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    own, options = sys.argv[1:], []
    if "--" in own:
        place = own.index("--")
        own, options = own[:place], own[place + 1 :]
    words = parser.parse_args(own)
    trees = [tree.resolve() for tree in words.trees]
    rounds = [
        [run(tree, words.mode, words.model.resolve(), words.cases, options) for tree in trees]
        for _ in range(words.rounds)
    ]
    rows = []
    for number, case in enumerate(rounds[0][0]["results"]):
        times = [[one[place]["results"][number]["p50_ms"] for one in rounds] for place in range(len(trees))]
        for tree, of_tree in zip(words.trees, times, strict=True):
            shape = case["tokens"], case["n"], case.get("batch", case.get("clients"))
            rows.append([*shape, str(tree), *of_tree, min(of_tree) / min(times[0])])
    columns = ["tokens", "n", "load", "sources", *(f"p50_ms {number + 1}" for number in range(words.rounds)), "ratio"]
    print(table(columns, rows))
    if words.out is not None:
        origins = [one["origin"] for one in rounds[0]]
        facts = {"mode": words.mode, "cases": words.cases, "options": options, "origins": origins}
        write_json(words.out, {**facts, "columns": columns, "rows": rows})


if __name__ == "__main__":
    main()
