"""What was skipped is told at the end, with its reason."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="needs a device")
def test_a(): pass

@pytest.mark.skipif(True, reason="needs a device")
def test_b(): pass

def test_c(): pytest.skip("needs two")

def test_d(): pass
"""


def told(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, str(folder)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_each_reason_is_told_once_in_one_process_and_in_two(tmp_path):
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    test = tmp_path / "test_it.py"
    test.write_text(TESTS)
    for words in ((), ("-n", "2")):
        lines = told(tmp_path, *words).splitlines()
        assert [line.split(maxsplit=1) for line in lines if "needs" in line] == [
            ["2", "needs a device"],
            ["1", "needs two"],
        ]
    assert "= skipped =" not in told(tmp_path, "-k", "test_d")
