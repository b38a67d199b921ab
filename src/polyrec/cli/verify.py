"""`polyrec verify`: whether a model folder, run as it will be served, is as good as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..hardware.base.config import HardwareConfig
from ..models.options import ModelOptions
from .hardware_flags import hardware_flags
from .model_flags import model_flags

if TYPE_CHECKING:
    from ..verify.row import VerifyRow

app = typer.Typer(no_args_is_help=True)


@app.callback()
def verify() -> None:
    """Measure a model folder against limits."""


@app.command()
@hardware_flags
@model_flags
def model(
    folder: Annotated[Path, typer.Argument(help="A model folder written by `polyrec train`.")],
    data: Annotated[
        Path | None, typer.Option(help="The prepared folder it was trained from; without it, histories are drawn.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="A folder with the plain weights, where FOLDER holds quantised ones.")
    ] = None,
    users: Annotated[int, typer.Option(min=1, help="Histories asked at most.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON on standard output.")] = False,
    *,
    options: ModelOptions,
    hardware: HardwareConfig,
) -> None:
    """Print a table of what is measured, with its limits; exit code 1 when one is not kept.

    First row: the model in fp8 against itself without quantisation, by the overlap of their beam sets and by NDCG@10.
    """
    from ..hardware import get_hardware_backend
    from ..verify.quality import fp8_row

    backend = get_hardware_backend(hardware)
    rows = [fp8_row(folder, backend, options=options, reference=reference, data=data, users=users, seed=seed)]
    passed = all(row.passed for row in rows)
    if as_json:
        print(json.dumps({"passed": passed, "rows": [row.to_dict() for row in rows]}, ensure_ascii=False))
    else:
        _show(rows)
    if not passed:
        raise typer.Exit(1)


def _show(rows: list[VerifyRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table()
    for column in ("row", "measure", "value", "at least", "verdict"):
        table.add_column(column, justify="right" if column in ("value", "at least") else "left", overflow="fold")
    for row in rows:
        for position, (name, value) in enumerate(row.measures.items()):
            least = row.limits.get(name)
            verdict = "" if least is None else "[green]kept[/]" if value >= least else "[bold red]missed[/]"
            limit = "" if least is None else f"{least:.2f}"
            table.add_row("" if position else row.name, name, f"{value:.4f}", limit, verdict)
        table.add_section()
    console.print(table)
    for row in rows:
        console.print(f"{row.name}: {row.basis}.", markup=False, highlight=False)
