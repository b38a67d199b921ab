"""`polyrec plugins`: what is installed and what each would register, importing none; `new` writes a skeleton. No torch."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..hardware.plugin.survey import PluginReport, PluginsReport

app = typer.Typer()


@app.callback(invoke_without_command=True)
def plugins(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="The list as JSON on standard output.")] = False,
) -> None:
    """List the installed plugins, by group, with what each would register. No plugin is imported."""
    from ..core.errors import ConfigError
    from ..hardware.plugin.declare import API_VERSION
    from ..hardware.plugin.survey import inspect_plugins

    if context.invoked_subcommand is not None:
        if as_json:
            raise ConfigError("flag_unused", f"--json has no say in `{context.invoked_subcommand}`.", "Leave it out.")
        return
    report = inspect_plugins()
    if as_json:
        print(json.dumps({"api_version": API_VERSION, **dataclasses.asdict(report)}, ensure_ascii=False))
    else:
        _show(report, API_VERSION)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The distribution's name, in lower case, as in my-plugin.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to make, which must not exist (default: NAME, here).", metavar="FOLDER"),
    ] = None,
) -> None:
    """Write a plugin that installs and passes conformance: one operation, one attention backend, their tests."""
    from rich.console import Console

    from .plugin_skeleton import Skeleton, write_skeleton

    skeleton = Skeleton(name)
    folder = out or Path(name)
    write_skeleton(skeleton, folder)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"wrote {folder}. Install it, test it, and use it:", markup=False)
    quoted = shlex.quote(str(folder))
    console.print(f"  pip install -e {quoted} && pytest {quoted}", markup=False)
    flags = f"--extra-ops {skeleton.ops_entry} --extra-att {skeleton.att_entry}"
    console.print(f"  polyrec devices {flags}", markup=False)


def _show(report: PluginsReport, api_version: str) -> None:
    """A table for each group, also for an empty one, so that one sees what exists."""
    from rich.console import Console

    from ..hardware.plugin.source import FLAGS, GROUPS, KINDS

    console = Console(highlight=False)
    for kind in KINDS:
        found = [plugin for plugin in report.plugins if plugin.kind == kind]
        console.print(f"[bold]{GROUPS[kind]}[/] ({FLAGS[kind]}): {len(found) or 'none'} installed")
        if found:
            _show_group(found, console)
    for fault in report.faults:
        console.print(f"[red]fault[/] {_escaped(fault)}")
    console.print(f"polyrec.plugin_api {api_version}. `polyrec plugins new NAME` writes a plugin to begin with.")


def _show_group(found: list[PluginReport], console: Console) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("name", "distribution", "would register", "for"):
        table.add_column(column, overflow="fold")
    for plugin in found:
        lines = [_escaped(_registration(plugin, index)) for index in range(len(plugin.registers))]
        lines += [f"[red]{_escaped(fault)}[/]" for fault in plugin.faults]
        table.add_row(
            _escaped(plugin.name),
            _escaped(f"{plugin.distribution} {plugin.version}"),
            "\n".join(lines) or _unknown(),
            _escaped(_meant_for(plugin)),
        )
    console.print(table)


def _registration(plugin: PluginReport, index: int) -> str:
    """`norm.rms_norm: fast_norm (my_plugin.ops:12)`."""
    found = plugin.registers[index]
    condition = ", under a condition" if found.conditional else ""
    return f"{found.key}: {found.implementation} ({found.module}:{found.line}{condition})"


def _meant_for(plugin: PluginReport) -> str:
    """Platforms, API range and requirements, as far as they are written down."""
    if plugin.modules is None:
        return _unknown()
    parts = [", ".join(plugin.platforms) if plugin.platforms is not None else "any platform"]
    parts += [f"API {plugin.api}"] if plugin.api else []
    return "; ".join([*parts, *plugin.requires])


def _unknown() -> str:
    from ..hardware.plugin.survey import UNKNOWN

    return UNKNOWN


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
