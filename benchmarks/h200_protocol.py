"""The shapes that the engine is judged on, measured by `polyrec bench` and set beside what they shall reach.

The model is the OneRec-1.7B shape of random weights with 1.52 million SIDs; it is made first where --model does not exist.
Each step leaves its JSON under --out; the table comes last. A step that fails is told and the
others go on.

    python benchmarks/h200_protocol.py --model /tmp/onerec --out /tmp/results                      # all steps
    python benchmarks/h200_protocol.py --model /tmp/onerec --out /tmp/results --steps serve kernels  # some
    python benchmarks/h200_protocol.py … --serve-options "--quantization fp8"                      # flags of `polyrec serve`

On a machine without the repository, say which commit it is: POLYREC_COMMIT=… python benchmarks/h200_protocol.py …
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyrec.bench.load import LoadError
from polyrec.bench.server import own_server

SERVE_CASES = (  # the last number: requests that make about five seconds at the aim
    "2455:50:1:300",
    "2455:50:8,32:600",
    "305:50:1:500",
    "305:50:32:4000",
    "305:512:32:1500",
    "1000:256:1:500",
    "1000:256:8:1000",
    "5000:256:4:200",
    "2455:1000:8:300",
)
OFFLINE_CASE = "5000:256:8"
CACHE_CASE = "2455:50:1"
KERNEL_CASES = ("2455:50:1,8", "305:512:8", "1000:256:8")


@dataclass(frozen=True)
class Goal:
    """file: the step's JSON. tokens, n, load: which result. field: what of it. least, aim: what it shall reach; above: whether
    more is better."""

    file: str
    tokens: int
    n: int
    load: int
    field: str
    least: float
    aim: float
    above: bool = False

    def found(self, results: list[dict[str, Any]]) -> float | None:
        """The measured figure; prompts are at most an item longer than asked for."""
        for one in results:
            same = (one["n"], one.get("clients", one.get("batch"))) == (self.n, self.load)
            if same and 0 <= one["tokens"] - self.tokens < 8 and one.get("visit") != "first_visit":
                return one[self.field]
        return None

    def verdict(self, value: float | None) -> str:
        """What the figure reaches."""
        if value is None:
            return "not measured"
        aim, least = (
            (value >= self.aim, value >= self.least) if self.above else (value <= self.aim, value <= self.least)
        )
        return "aim" if aim else "reached" if least else "MISSED"


GOALS = (
    Goal("serve", 2455, 50, 1, "p50_ms", 14, 9),
    Goal("serve", 2455, 50, 32, "requests_per_second", 100, 140, above=True),
    Goal("serve", 305, 50, 32, "requests_per_second", 500, 900, above=True),
    Goal("serve", 305, 512, 32, "requests_per_second", 200, 300, above=True),
    Goal("serve", 1000, 256, 1, "p50_ms", 8, 5),
    Goal("serve", 1000, 256, 8, "requests_per_second", 180, 250, above=True),
    Goal("serve", 5000, 256, 4, "requests_per_second", 38, 52, above=True),
    Goal("offline_bf16", 5000, 256, 8, "p50_ms", 260, 230),
    Goal("offline_fp8", 5000, 256, 8, "p50_ms", 175, 145),
    Goal("serve", 2455, 1000, 8, "requests_per_second", 50, 80, above=True),
    Goal("cache", 2455, 50, 1, "p50_ms", 6, 3),
)
READY_LEAST, READY_AIM = 30.0, 12.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the synthetic model's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--serve-options", default="--quantization fp8", help="flags of `polyrec serve`, in one text")
    parser.add_argument("--shape", default="onerec-1.7b", help="of the model that is made")
    parser.add_argument("--processes", type=int, default=6, help="client processes, at most")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.model / "polyrec.json").is_file():
        bench("make-model", args.model, "--shape", args.shape)
    failed = [step for step in args.steps if not attempt(step, args)]
    print(table(args.out))
    if failed:
        print("failed:", ", ".join(failed))
    return bool(failed)


def attempt(step: str, args: argparse.Namespace) -> bool:
    """Runs a step; whether it ended well."""
    try:
        return STEPS[step](args)
    except LoadError as error:
        print(error, flush=True)
        return False


def serve(args: argparse.Namespace) -> bool:
    """All cases, then users who return with 16 tokens more, all against one server, whose start is timed."""
    cases = [word for case in SERVE_CASES for word in ("--case", case)]
    with own_server(args.model, shlex.split(args.serve_options)) as (url, ready):
        (args.out / "ready.json").write_text(json.dumps({"ready_seconds": ready}) + "\n")
        print(f"ready after {ready:.1f} s", flush=True)
        files = ("--out", args.out / "serve.json", "--plot", args.out / "serve.png")
        fine = bench("serve", args.model, "--url", url, *cases, "--processes", args.processes, *files)
        words = ("--case", CACHE_CASE, "--new-items", 3, "--users", 100, "--out", args.out / "cache.json")
        return bench("cache", args.model, "--url", url, *words) and fine


def offline_bf16(args: argparse.Namespace) -> bool:
    """The search alone, unquantised."""
    words = ("--case", OFFLINE_CASE, "--quantization", "none", "--out", args.out / "offline_bf16.json")
    return bench("offline", args.model, *words)


def offline_fp8(args: argparse.Namespace) -> bool:
    """The search alone, quantised."""
    words = ("--case", OFFLINE_CASE, "--quantization", "fp8", "--out", args.out / "offline_fp8.json")
    return bench("offline", args.model, *words)


def kernels(args: argparse.Namespace) -> bool:
    """Where the time goes, with traces."""
    cases = [word for case in KERNEL_CASES for word in ("--case", case)]
    files = ("--out", args.out / "kernels.json", "--profile", args.out / "trace.json")
    return bench("kernels", args.model, *cases, "--quantization", "fp8", *files)


STEPS = {step.__name__: step for step in (serve, offline_bf16, offline_fp8, kernels)}


def bench(*words: Any) -> bool:
    """One `polyrec bench` command; whether it ended well."""
    command = [sys.executable, "-m", "polyrec.cli.main", "bench", *map(str, words)]
    print("$ polyrec", shlex.join(command[3:]), flush=True)
    return subprocess.run(command, check=False).returncode == 0


def table(out: Path) -> str:
    """Every goal with what was measured, as Markdown."""
    lines = ["| tokens | n | load | figure | at least | aim | measured | |", "|---|---|---|---|---|---|---|---|"]
    facts = {
        path.stem: json.loads(path.read_text()) for path in out.glob("*.json") if not path.stem.startswith("trace")
    }
    for goal in GOALS:
        value = goal.found(facts.get(goal.file, {}).get("results", []))
        shown = "" if value is None else f"{value:.1f}"
        lines.append(
            f"| {goal.tokens} | {goal.n} | {goal.load} | {goal.file} {goal.field} | {goal.least:g} | {goal.aim:g} "
            f"| {shown} | {goal.verdict(value)} |"
        )
    if (ready := facts.get("ready", {}).get("ready_seconds")) is not None:
        verdict = "aim" if ready <= READY_AIM else "reached" if ready <= READY_LEAST else "MISSED"
        lines.append(f"| | | | seconds until ready | {READY_LEAST:g} | {READY_AIM:g} | {ready:.1f} | {verdict} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
