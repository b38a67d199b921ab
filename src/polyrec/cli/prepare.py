"""`polyrec prepare`: flags and config file to PrepareConfig, then the prepared folder, progress and a short summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..data.dataset import Dataset
    from ..data.prepare import PrepareConfig

COLUMNS = "Columns"
SIDS = "Semantic IDs"


def prepare(
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    events: Annotated[
        Path | None, typer.Option(help="Events: Parquet, CSV, TSV, JSONL, RecBole .inter, sequences.")
    ] = None,
    items: Annotated[Path | None, typer.Option(help="Item table with ids, names, text.")] = None,
    dataset: Annotated[str | None, typer.Option(help="A bundled data set instead: online-retail.")] = None,
    format: Annotated[
        str | None, typer.Option(help="Format of --events: auto, parquet, csv, tsv, jsonl, recbole, sequence.")
    ] = None,
    user_column: Annotated[str | None, typer.Option(help="Events: the user.", rich_help_panel=COLUMNS)] = None,
    item_column: Annotated[str | None, typer.Option(help="Events: the item.", rich_help_panel=COLUMNS)] = None,
    time_column: Annotated[str | None, typer.Option(help="Events: the time.", rich_help_panel=COLUMNS)] = None,
    basket_column: Annotated[
        str | None, typer.Option(help="Events: order or invoice, whose items have no order.", rich_help_panel=COLUMNS)
    ] = None,
    item_id_column: Annotated[str | None, typer.Option(help="Items: the id.", rich_help_panel=COLUMNS)] = None,
    text_column: Annotated[
        list[str] | None,
        typer.Option(help="Items: text to make vectors from; may be repeated.", rich_help_panel=COLUMNS),
    ] = None,
    name_column: Annotated[
        str | None, typer.Option(help="Items: the name people see.", rich_help_panel=COLUMNS)
    ] = None,
    time_format: Annotated[
        str | None, typer.Option(help="How times are written, as in %Y-%m-%d.", rich_help_panel=COLUMNS)
    ] = None,
    encoding: Annotated[str | None, typer.Option(help="Text encoding of the files.", rich_help_panel=COLUMNS)] = None,
    strict_data: Annotated[
        bool | None, typer.Option("--strict-data", help="Unusable rows are an error instead of a counted drop.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="auto, leave-one-out, basket or time.")] = None,
    validation_from: Annotated[
        str | None, typer.Option(help="With --split time: where validation starts, as in 2011-10-01.")
    ] = None,
    test_from: Annotated[str | None, typer.Option(help="With --split time: where the test starts.")] = None,
    vectors: Annotated[
        str | None,
        typer.Option(
            help="auto, text, cooccurrence, joined, sentence-transformers, or a .npy with a row per item.",
            rich_help_panel=SIDS,
        ),
    ] = None,
    sentence_model: Annotated[
        str | None, typer.Option(help="Model for --vectors sentence-transformers.", rich_help_panel=SIDS)
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Codes per SID (default 3).", rich_help_panel=SIDS)] = None,
    codebook_sizes: Annotated[
        str | None,
        typer.Option(help="Codes per level, as 64,64,64; by default from the number of items.", rich_help_panel=SIDS),
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Dimensions per kind of vector.", rich_help_panel=SIDS)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of SVD and k-means.", rich_help_panel=SIDS)] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder whose tokenizer is extended; else a new one.", rich_help_panel=SIDS),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML with these settings; flags win over it.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Make the folder anew although it is up to date.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Summary as JSON on standard output.")] = False,
) -> None:
    """Turn events and items into histories and semantic IDs: the folder that `polyrec train` starts from."""
    from ..core.config import make_settings, read_config_file
    from ..data.prepare import PrepareConfig, check_out, is_prepared, load_source, plan

    flags: dict[str, Any] = {
        "dataset": dataset,
        "events": events and str(events),
        "items": items and str(items),
        "format": format,
        "encoding": encoding,
        "time_format": time_format,
        "strict_data": strict_data,
        "split": split,
        "validation_from": validation_from,
        "test_from": test_from,
        "vectors": vectors,
        "sentence_model": sentence_model,
        "depth": depth,
        "codebook_sizes": codebook_sizes and _numbers(codebook_sizes),
        "dim": dim,
        "seed": seed,
        "tokenizer": tokenizer and str(tokenizer),
    }
    columns = {
        "user": user_column,
        "item": item_column,
        "time": time_column,
        "basket": basket_column,
        "item_id": item_id_column,
        "name": name_column,
        "text": text_column or None,
    }
    values = read_config_file(config) if config else {}
    _override(values, flags)
    chosen = {key: value for key, value in columns.items() if value is not None}
    in_file = values.get("columns") or {}
    if chosen and isinstance(in_file, dict):  # else the file's value names no columns, which is told below
        values["columns"] = {**in_file, **chosen}
    settings = make_settings(PrepareConfig, values, where=str(config) if config else "prepare")

    check_out(out)  # before the data are read: a wrong folder should not cost a minute
    data = load_source(settings)
    summary: dict[str, Any] = {"out": str(out), "plan": plan(data, settings), "data": data.report.to_dict()}
    if dry_run:
        summary["status"] = "dry run"
    elif not force and is_prepared(data, out, settings):
        summary["status"] = "up to date"
    else:
        summary["status"] = "prepared"
        _run(data, out, settings, force)
    if not dry_run:
        summary |= _results(out)
    if as_json:
        print(json.dumps(summary, ensure_ascii=False))
    else:
        _show(summary, data)


def _numbers(text: str) -> list[int]:
    from ..core.errors import ConfigError

    try:
        return [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        raise ConfigError(
            "codebook_sizes", f"--codebook-sizes {text!r} is not a list of numbers.", "Write it as 64,64,64."
        ) from None


def _override(values: dict[str, Any], flags: dict[str, Any]) -> None:
    """Flags win over the file; a flag that replaces one side of an either-or takes the file's other side away."""
    given = {key: value for key, value in flags.items() if value is not None}
    if "dataset" in given and not {"events", "items"} & given.keys():
        values.pop("events", None)
        values.pop("items", None)
    if "events" in given and "dataset" not in given:
        values.pop("dataset", None)
    if "depth" in given and "codebook_sizes" not in given:
        values.pop("codebook_sizes", None)
    if "codebook_sizes" in given and "depth" not in given:
        values.pop("depth", None)
    values.update(given)


def _run(data: Dataset, out: Path, settings: PrepareConfig, force: bool) -> None:
    from ..core.console import progress_bar
    from ..data.prepare import STEPS, prepare

    with progress_bar() as progress:
        task = progress.add_task("prepare", total=len(STEPS))

        def on_step(name: str) -> None:
            progress.update(task, description=name, completed=STEPS.index(name))

        prepare(data, out, settings, force=force, on_step=on_step)
        progress.update(task, description="prepared", completed=len(STEPS))


def _results(out: Path) -> dict[str, Any]:
    from ..core.files import read_json
    from ..data.prepare import PREPARED

    record, report = read_json(out / PREPARED), read_json(out / "sid_report.json")
    return {
        "plan": record["plan"],
        "fingerprint": record["fingerprint"],
        "data_digest": record["data_digest"],
        "leakage": record["leakage"],
        "collisions": report["collisions"],
        "neighbours": report["neighbours"],
    }


def _show(summary: dict[str, Any], data: Dataset) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    facts = summary["plan"]
    console.print(data.report.render())
    sizes = " × ".join(map(str, facts["codebook_sizes"]))
    console.print(
        f"\nSemantic IDs: {facts['num_items']:,} items, vectors {escape(facts['vectors'])}, codebooks {sizes} "
        f"({facts['code_space']:,} SIDs), split {facts['split']}, tokenizer {escape(facts['tokenizer'])}"
    )
    out = escape(summary["out"])
    if summary["status"] == "dry run":
        console.print(f"Dry run: nothing was written. Without --dry-run this would make {out}.")
        return
    for notice in summary["leakage"]:
        console.print(f"[yellow]leakage check[/]: {notice['count']:,} {escape(notice['message'])}")
    before, after = summary["collisions"]["before"], summary["collisions"]["after"]
    shared = ", ".join(f"{level['nearest_share']:.0%}" for level in summary["neighbours"][:-1])
    console.print(f"Items that share a SID: {before['share']:.1%} by nearest codes, {after['share']:.1%} as given out")
    if shared:
        console.print(f"Nearest items that share the first code(s): {shared}")
    note = "is up to date (--force makes it anew)" if summary["status"] == "up to date" else "is ready"
    console.print(f"[bold]{out}[/] {note}; its picture: {out}/sid_report.png", highlight=False)
