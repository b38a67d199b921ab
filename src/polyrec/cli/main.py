"""The `polyrec` command. Commands import what they need when they run, so `--help` answers at once."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import typer
from rich.console import Console

from .. import __version__
from ..core.errors import PolyrecError
from .warning_lines import show_warnings

COMMANDS = ("demo", "prepare", "train", "evaluate", "recommend", "serve", "devices")
GROUPS = ("bench", "plugins", "verify")
INTERRUPTED = 130  # exit code of a process that Ctrl-C ended: 128 + SIGINT


def build_app() -> typer.Typer:
    """All commands, each from its own file."""
    app = typer.Typer(
        help="Train and serve generative recommenders.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": with_hyphens},
    )

    @app.callback(invoke_without_command=True)
    def about(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
        if version:
            print(__version__)
            raise typer.Exit

    for name in COMMANDS:
        app.command(name)(getattr(import_module(f"polyrec.cli.{name}"), name))
    for name in GROUPS:
        app.add_typer(import_module(f"polyrec.cli.{name}").app, name=name)
    return app


def with_hyphens(word: str) -> str:
    """`extra_ops` as `extra-ops`: how options, command names and choices are compared, so that underscores do as well.

    Click hands every choice through this too, those that are known and those that are given; values stay as they are.
    """
    return word.replace("_", "-")


def main() -> None:
    """Runs a command. A user's mistake prints its code and remedy and exits with 2; Ctrl-C exits with 130."""
    # Before torch is imported: OpenMP threads that spin while they wait starve the other threads of a server on few cores
    # (218 to 570 ms a request against 14 to 18, two cores, other work beside it).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    show_warnings()
    try:
        build_app()(standalone_mode=True)
    except PolyrecError as error:
        console = Console(stderr=True, highlight=False)
        console.print(f"[bold red]error[/] {error.code}: ", end="")
        console.print(error.message, markup=False)
        if error.remedy:
            console.print("[bold]What to do:[/] ", end="")
            console.print(error.remedy, markup=False)
        sys.exit(2)
    except KeyboardInterrupt:  # while the commands were imported
        _say_stopped()
        sys.exit(INTERRUPTED)
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:  # Typer turns Ctrl-C inside a command into this
            _say_stopped()
        raise


def _say_stopped() -> None:
    Console(stderr=True).print("Stopped. Whatever was finished is whole; run the same command again.")


if __name__ == "__main__":
    main()
