"""Runs the engine with and without the example plugins: the operation is called, and the recommendations are the same.

    python examples/polyrec-example-plugin/check.py

Uses a small random model. Both runs are real commands: `polyrec recommend` once as it is, and once with
`--extra-ops example_ops --extra-att example_att`; then once more from Python, where the op table counts the calls.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from polyrec.engine.recommender import Recommender
from polyrec.hardware import get_hardware_backend
from polyrec.testing.tiny import write_tiny_model

HISTORY = [f"item-{row}" for row in (3, 14, 15, 92, 65)]
PLUGINS = ["--extra-ops", "example_ops", "--extra-att", "example_att"]
N = 20
CLOSE = 1e-4  # the plugins round otherwise than what they replace


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        model = write_tiny_model(Path(temporary) / "model")
        plain, extended = recommend(model), recommend(model, *PLUGINS)
        assert [item for item, _ in extended] == [item for item, _ in plain], (extended, plain)
        worst = max(abs(ours - theirs) for (_, ours), (_, theirs) in zip(extended, plain, strict=True))
        assert worst < CLOSE, worst
        print(
            f"polyrec recommend {' '.join(PLUGINS)}: the same {len(plain)} items; scores differ by at most {worst:.1e}"
        )
        recommender = Recommender.from_pretrained(model, extra_ops="example_ops", extra_att="example_att")
        answer = recommender.recommend(HISTORY, n=N)
    assert [item.item_id for item in answer.items] == [item for item, _ in plain], answer
    table, row = get_hardware_backend().table, get_hardware_backend().table.row("norm.rms_norm")
    calls = table.calls["norm.rms_norm"].count
    assert calls > 0, "the plugin's operation was never called"
    print(f"norm.rms_norm is {row.implementation} of {row.source}: called {calls} times")


def recommend(model: Path, *flags: str) -> list[tuple[str, float]]:
    """Items and scores that the command prints, best first."""
    command = [sys.executable, "-c", "from polyrec.cli.main import main; main()", "recommend", str(model)]
    command += ["--history", ";".join(HISTORY), "-n", str(N), "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"polyrec recommend {' '.join(flags)} failed:\n{done.stderr}")
    return [(item["item_id"], item["score"]) for item in json.loads(done.stdout)["items"]]


if __name__ == "__main__":
    main()
