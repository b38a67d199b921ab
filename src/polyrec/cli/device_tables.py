"""The report of `polyrec devices` for people: tables that fit into 100 columns."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

STATES = {"usable": "[green]usable[/]", "absent": "[dim]absent[/]", "failed": "[red]failed[/]"}
OUR_FOLDERS = ("polyrec.hardware.", "backends.")


def show_report(report: dict[str, Any]) -> None:
    """Versions, platforms, then the chosen platform or the error in its place."""
    console = Console(highlight=False)
    built = ", ".join(f"{name} {value}" for name, value in report["torch"]["build"].items() if value)
    console.print(
        f"polyrec {report['polyrec']} · torch {report['torch']['version']} ({escape(built) or 'no accelerator'}) · "
        f"Python {report['python']}"
    )
    console.print(_platforms(report["platforms"]))
    if report["error"] is not None:
        error = report["error"]
        console.print(f"[bold red]No platform is chosen[/] {error['code']}: ", end="")
        console.print(error["message"], markup=False)
        console.print("[bold]What to do:[/] ", end="")
        console.print(error["remedy"], markup=False)
        return
    _show_chosen(report["chosen"], console)


def _platforms(platforms: list[dict[str, Any]]) -> Table:
    table = _table("Platforms", "platform", "state", "devices", "reason and remark")
    for found in platforms:
        words = " ".join(text for text in (found["reason"], found["remark"]) if text)
        devices = "\n".join(f"{index}: {name}" for index, name in enumerate(found["devices"]))
        table.add_row(escape(found["name"]), STATES[found["state"]], escape(devices), escape(words))
    return table


def _show_chosen(chosen: dict[str, Any], console: Console) -> None:
    console.print(
        f"Chosen: [bold]{escape(chosen['platform'])}[/] on {escape(chosen['device'])}. {escape(chosen['remark'])}".rstrip()
    )
    for device in chosen["devices"]:
        memory = device["memory"]
        room = f", {_gib(memory['free'])} of {_gib(memory['total'])} GiB free" if memory else ""
        console.print(f"  {device['index']}: {device['name']}{room}", markup=False)
    abilities = {name: value for name, value in chosen["capabilities"].items() if name != "dtypes"}
    dtypes = " ".join(map(short_dtype, chosen["capabilities"]["dtypes"]))
    words = ", ".join(f"{name} {'yes' if value else 'no'}" for name, value in abilities.items())
    console.print(f"  Capabilities: {dtypes}; {words}", markup=False)
    for plugin in chosen["plugins"]:
        console.print(f"  Plugin {plugin['source']}: {', '.join([*plugin['ops'], *plugin['attention']])}", markup=False)
    console.print(_attention(chosen["attention"]))
    console.print(_ops(chosen["ops"]))
    fallbacks = len(chosen["fallbacks"]) or "none"
    console.print(
        f"{len(chosen['ops'])} operations, {fallbacks} by fallback. Fingerprint {chosen['fingerprint'][:16]}."
    )


def _attention(attention: dict[str, Any]) -> Table:
    table = _table("Attention", "backend", "from", "usable", "lacking")
    for found in attention["backends"]:
        usable = "[green]yes[/]" if found["usable"] else "[red]no[/]"
        chosen = f", {escape(attention['asked'])} picks it" if found["name"] == attention["picked"] else ""
        table.add_row(
            escape(found["name"]), escape(found["source"]), usable + chosen, escape("; ".join(found["lacking"]))
        )
    return table


def _ops(rows: list[dict[str, Any]]) -> Table:
    """Grouped: a group's name stands beside its first field only."""
    table = _table("Operations", "group", "field", "tier", "implementation", "origin", "dtypes")
    group = ""
    for row in rows:
        own, _, field = row["field"].partition(".")
        if own != group and group:
            table.add_section()
        table.add_row(
            "" if own == group else own,
            field,
            row["tier"],
            escape(_short(row["implementation"])),
            escape(_origin(row)),
            " ".join(map(short_dtype, row["dtypes"])),
        )
        group = own
    return table


def _short(implementation: str) -> str:
    """Without the folders in which every built-in stands."""
    for folder in OUR_FOLDERS:
        implementation = implementation.removeprefix(folder)
    return implementation


def _origin(row: dict[str, Any]) -> str:
    if row["fallback"]:
        return f"falls back: {row['source']}"
    if row["origin"] == "absent":
        return "absent"
    return f"{row['origin']} {row['source']}".rstrip()


def short_dtype(name: str) -> str:
    """`bf16` for bfloat16, `fp8` for float8_e4m3fn: the words of the field."""
    if name.startswith("float8"):
        return "fp8"
    return name.replace("bfloat", "bf").replace("float", "fp")


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("group", "field", "tier"))
    return table


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"
