"""Every command explains itself: `--help` ends well and names all its options, each with a sentence."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from polyrec.cli.main import build_app


def commands(command, path=()):
    """(path, command) of the root and of everything below it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


APP = build_app()
ALL = list(commands(typer.main.get_command(APP)))


def test_the_main_commands_exist():
    names = {" ".join(path) for path, _ in ALL if path}
    assert names >= {"demo", "prepare", "train", "evaluate", "recommend", "serve", "devices", "plugins", "plugins new"}


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) or "polyrec" for path, _ in ALL])
def test_help_names_every_option(path, command):
    result = CliRunner().invoke(APP, [*path, "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    assert result.exit_code == 0, result.output
    assert command.help
    for option in command.params:
        if getattr(option, "hidden", False):
            continue
        if option.param_type_name == "option":
            assert any(name in result.output for name in option.opts), option.opts
            assert option.help, f"{option.opts} has no help"
        for name in (*option.opts, *option.secondary_opts):
            assert not name.startswith("-") or "_" not in name, f"{name} must use hyphens"


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(APP, ["no-such-command"])
    assert result.exit_code == 2
