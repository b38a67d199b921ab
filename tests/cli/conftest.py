"""A prepared folder and a trained model of the example shop, made once by the commands themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyrec.cli.main import build_app
from polyrec.hardware import process

SHOP = Path(__file__).parents[2] / "examples" / "shop"


@pytest.fixture(scope="session")
def polyrec():
    """Runs a command as if in a process of its own, which chooses its hardware; a fault comes out as its exception."""

    def run(*arguments: object):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "_chosen", [])
            result = CliRunner().invoke(build_app(), [str(argument) for argument in arguments], env={"COLUMNS": "160"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture(scope="session")
def shop(tmp_path_factory, polyrec):
    """A folder with events.csv, items.csv, prepared/ and model/ (barely trained)."""
    folder = tmp_path_factory.mktemp("shop")
    for name in ("events.csv", "items.csv"):
        shutil.copy(SHOP / name, folder / name)
    files = ["--events", folder / "events.csv", "--items", folder / "items.csv", "--time-column", "ordered_at"]
    assert polyrec("prepare", *files, "--out", folder / "prepared").exit_code == 0
    trained = polyrec(
        "train", "--data", folder / "prepared", "--out", folder / "model", "--steps", 30, "--eval-every", 0
    )
    assert trained.exit_code == 0, trained.output
    return folder
