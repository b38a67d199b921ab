"""Real `polyrec train` processes: stopped by Ctrl-C, killed, gone on with, they end where a quiet run ends, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from small_shop import read_log

STEPS = 300


class TrainProcess:
    """One `polyrec train` over the shop. One thread, so that sums are added in one order."""

    def __init__(self, shop: Path, out: Path, recipe: Path) -> None:
        self.out = out
        self.errors = out.with_suffix(".stderr")
        with open(self.errors, "ab") as stderr:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "polyrec.cli.main", "train",
                    "--data", str(shop), "--out", str(out), "--config", str(recipe),
                ],
                stderr=stderr,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def stop_after(self, step: int, signal_number: int) -> int:
        """Sends a signal once a checkpoint of `step` or later is there; returns the exit code."""
        folder = self.out / "run" / "checkpoints"
        end = time.monotonic() + 120
        while not any(int(path.name[5:]) >= step for path in folder.glob("step-*")):
            assert self._process.poll() is None, f"ended before step {step}: {self.errors.read_text()}"
            assert time.monotonic() < end, f"never reached step {step}"
            time.sleep(0.002)
        self._process.send_signal(signal_number)
        return self._process.wait(60)

    def wait(self) -> int:
        return self._process.wait(120)


def steps_of(out: Path) -> list[dict[str, object]]:
    """The log without what a clock says."""
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in read_log(out)]


@pytest.fixture(scope="module")
def quiet_and_resumed(shop, sizes_file, tmp_path_factory):
    """One run left alone; one stopped by SIGINT, then by SIGKILL, then let end; and how the second one ended each time."""
    folder = tmp_path_factory.mktemp("resume")
    recipe = folder / "recipe.yaml"
    settings = {
        "model_config_file": str(sizes_file), "steps": STEPS, "eval_every": 50, "patience": 100, "checkpoint_every": 10,
        "prompt": {"max_items": 8}, "seed": 7,
    }  # fmt: skip
    recipe.write_text(yaml.safe_dump(settings))
    quiet, out = TrainProcess(shop, folder / "quiet", recipe), folder / "resumed"
    ended = []
    for step, signal_number in ((20, signal.SIGINT), (60, signal.SIGKILL)):
        code = TrainProcess(shop, out, recipe).stop_after(step, signal_number)
        found = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
        ended.append((code, found, len(read_log_or_less(out))))
    assert TrainProcess(shop, out, recipe).wait() == 0, (folder / "resumed.stderr").read_text()
    assert quiet.wait() == 0, quiet.errors.read_text()
    return folder / "quiet", out, ended


def read_log_or_less(out: Path) -> list[str]:
    """The lines of a log whose last one may be half written."""
    return (out / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()


def test_it_was_stopped_in_the_middle(quiet_and_resumed):
    _, _, ((interrupted, _, first_lines), (killed, _, second_lines)) = quiet_and_resumed
    assert killed == -signal.SIGKILL
    assert interrupted == 130
    assert 20 <= first_lines < second_lines < STEPS


def test_ctrl_c_leaves_nothing_half_written(quiet_and_resumed):
    """Whole checkpoints, and neither a model nor a temporary file."""
    _, out, ((_, found, _), _) = quiet_and_resumed
    names = [Path(name) for name in found]
    assert not [name for name in names if any(part.startswith(".") for part in name.parts)]
    assert {name.parts[0] for name in names} == {"run"}
    by_checkpoint = {name.parts[2]: set() for name in names if name.parts[1] == "checkpoints"}
    for name in names:
        if name.parts[1] == "checkpoints":
            by_checkpoint[name.parts[2]].add(name.name)
    assert by_checkpoint
    whole = {"model.safetensors", "optimizer.pt", "progress.json"}
    assert all(files - {"best.pt"} == whole for files in by_checkpoint.values())
    errors = out.with_suffix(".stderr").read_text()
    assert "Traceback" not in errors
    assert "run the same command" in errors


def test_losses_equal_a_quiet_run_bit_for_bit(quiet_and_resumed):
    quiet, resumed, _ = quiet_and_resumed
    expected = steps_of(quiet)
    assert [line["step"] for line in expected if "loss" in line] == list(range(1, STEPS + 1))
    assert steps_of(resumed) == expected


def test_weights_equal_a_quiet_run_bit_for_bit(quiet_and_resumed):
    quiet, resumed, _ = quiet_and_resumed
    for name in ("model.safetensors", "config.json", "polyrec.json", "catalog.parquet", "tokenizer.json"):
        assert (resumed / name).read_bytes() == (quiet / name).read_bytes(), name
    assert (resumed / "run" / "finished.json").is_file()
    assert not list(resumed.rglob(".*")), "what the killed process left half-written is gone"
