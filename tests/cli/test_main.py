"""The command line as a process: a user's mistake ends with exit code 2, its code and remedy, and without a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from polyrec import __version__
from polyrec.cli import main as command_line


def process(*arguments):
    command = [sys.executable, "-m", "polyrec.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["prepare", "--events", "absent.csv", "--out", "x"], "file_missing"),
        (["train", "--data", "absent", "--out", "x"], "not_prepared"),
        (["evaluate", "--data", "absent"], "prepared_incomplete"),
        (["recommend", "absent", "--history", "a"], "model_folder_missing"),
        (["recommend", "absent", "--history", "a", "--hardware-platform", "abacus"], "platform_unknown"),
        (["serve", "absent", "--port", "0"], "model_folder_missing"),
        (["plugins", "new", "no name"], "plugin_name_invalid"),
    ],
)
def test_a_mistake_is_told_in_one_breath(arguments, code, tmp_path):
    result = process(*arguments)
    assert result.returncode == 2
    assert f"error {code}: " in result.stderr
    assert "What to do: " in result.stderr
    assert "Traceback" not in result.stderr + result.stdout


def test_the_version():
    result = process("--version")
    assert (result.returncode, result.stdout.strip()) == (0, __version__)


def test_ctrl_c_ends_with_130(monkeypatch, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "build_app", lambda: interrupted)
    with pytest.raises(SystemExit) as caught:
        command_line.main()
    assert caught.value.code == 130
    assert "Traceback" not in capsys.readouterr().err
