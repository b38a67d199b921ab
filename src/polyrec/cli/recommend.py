"""`polyrec recommend`: flags to recommendations, for one history on the terminal or for a file of users."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.request import SCORE_HELP, ScoreRule
from ..hardware.base.config import HardwareConfig
from ..models.options import ModelOptions
from .hardware_flags import hardware_flags
from .model_flags import model_flags

if TYPE_CHECKING:
    from ..core.request import Recommendation, RecommendRequest
    from ..engine.files import FileSummary
    from ..engine.recommender import Recommender
    from ..hardware import HardwareBackend

COLUMNS = "Columns of --input"


class Unknown(str, Enum):
    """What to do with history items that the catalog does not know."""

    drop = "drop"
    error = "error"


class Cold(str, Enum):
    """What to do with a user without any known item."""

    popular = "popular"
    error = "error"


@hardware_flags
@model_flags
def recommend(
    model: Annotated[Path, typer.Argument(help="A model folder written by `polyrec train`.")],
    input: Annotated[
        Path | None,
        typer.Option(
            help="Events (user, item, time, basket), or a row a user with a `history`; Parquet, JSONL, CSV, …"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the recommendations go: .parquet, .jsonl, .csv or .tsv.")
    ] = None,
    history: Annotated[
        str | None, typer.Option(help="One user's history instead of --input: 'A,B;C', semicolons between baskets.")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Items per user.")] = 10,
    beam_width: Annotated[int | None, typer.Option(min=1, help="Prefixes that live in the search (default n).")] = None,
    exclude_seen: Annotated[
        bool, typer.Option("--exclude-seen/--keep-seen", help="Whether items of the history are left out.")
    ] = False,
    exclude: Annotated[
        str | None, typer.Option(help="Items never recommended: ids as A,B, or a file (.txt, or with an item column).")
    ] = None,
    allow: Annotated[
        str | None, typer.Option(help="Only these items may be recommended: ids as A,B, or a file.")
    ] = None,
    unknown: Annotated[Unknown, typer.Option(help="History items that the catalog does not know.")] = Unknown.drop,
    cold: Annotated[Cold, typer.Option(help="Users without any known item.")] = Cold.popular,
    batch_size: Annotated[int, typer.Option(min=1, help="Most users in one engine batch.")] = 64,
    user_column: Annotated[str | None, typer.Option(help="The user.", rich_help_panel=COLUMNS)] = None,
    item_column: Annotated[str | None, typer.Option(help="The item of an event.", rich_help_panel=COLUMNS)] = None,
    time_column: Annotated[str | None, typer.Option(help="The time of an event.", rich_help_panel=COLUMNS)] = None,
    basket_column: Annotated[str | None, typer.Option(help="Order or invoice.", rich_help_panel=COLUMNS)] = None,
    format: Annotated[
        str, typer.Option(help="auto, parquet, csv, tsv, jsonl, recbole, sequence.", rich_help_panel=COLUMNS)
    ] = "auto",
    time_format: Annotated[
        str | None, typer.Option(help="How times are written, as in %Y-%m-%d.", rich_help_panel=COLUMNS)
    ] = None,
    encoding: Annotated[str, typer.Option(help="Text encoding of the file.", rich_help_panel=COLUMNS)] = "utf-8",
    as_json: Annotated[bool, typer.Option("--json", help="Answer or summary as JSON on standard output.")] = False,
    score_rule: Annotated[ScoreRule, typer.Option(help=SCORE_HELP)] = "level",
    *,
    options: ModelOptions,
    hardware: HardwareConfig,
) -> None:
    """Recommend items: for one history given here, or for every user of a file."""
    from ..core.request import RecommendRequest
    from ..engine.history_files import open_histories, parse_baskets
    from ..hardware import get_hardware_backend

    of_files = {
        "--user-column": user_column,
        "--time-column": time_column,
        "--basket-column": basket_column,
        "--time-format": time_format,
    }
    _check_flags(input, output, history, [flag for flag, value in of_files.items() if value is not None])
    backend = get_hardware_backend(hardware)
    template = RecommendRequest(
        history=parse_baskets(history or ""),
        n=n,
        beam_width=beam_width,
        exclude=_items("--exclude", exclude, item_column) or (),
        allow=_items("--allow", allow, item_column),
        exclude_seen=exclude_seen,
        unknown=unknown.value,
        cold=cold.value,
    )
    if input is None:
        recommender = _load(model, batch_size, score_rule, options, backend)
        _warn_unknown_filters(recommender, template)
        answer = recommender.recommend_batch([template])[0]
        if as_json:
            print(json.dumps(answer_dict(answer), ensure_ascii=False))
        else:
            _show_answer(template, answer, recommender)
        return

    from ..core.config import make_settings
    from ..data.columns import ColumnMap

    columns = {"user": user_column, "item": item_column, "time": time_column, "basket": basket_column}
    source = open_histories(
        input,
        make_settings(ColumnMap, columns, where="polyrec recommend"),
        format=format,  # type: ignore[arg-type]  # read_table refuses other words
        encoding=encoding,
        time_format=time_format,
    )
    recommender = _load(model, batch_size, score_rule, options, backend)
    _warn_unknown_filters(recommender, template)
    assert output is not None
    summary = _run(recommender, source, output, template, batch_size)
    report = source.report
    if as_json:
        data = None if report is None else report.to_dict()
        print(json.dumps({"output": str(output), **summary.to_dict(), "data": data}, ensure_ascii=False))
        return
    if report is not None and (report.drops or report.warnings):
        _console().print(report.render())
    _show_summary(summary, output, recommender)


def answer_dict(answer: Recommendation) -> dict[str, Any]:
    """The answer as the server's `/v1/recommend` gives it, without what belongs to HTTP."""
    items = [
        {"rank": rank, "item_id": item.item_id, "score": item.score, "sid": item.sid, "name": item.name}
        for rank, item in enumerate(answer.items, 1)
    ]
    return {
        "items": items,
        "score_rule": answer.score_rule,
        "source": answer.source,
        "unknown_items": list(answer.unknown_items),
    }


def _check_flags(input: Path | None, output: Path | None, history: str | None, of_files: list[str]) -> None:
    """Faults that need no model, before it is loaded. of_files: the given flags that only say how to read --input."""
    from ..core.errors import ConfigError
    from ..engine.files import output_format

    if (input is None) == (history is None):
        raise ConfigError(
            "input_or_history",
            "Give either --input FILE or --history." if input is None else "Give --input or --history, not both.",
            "E.g. --input events.csv --output recommendations.csv, or --history 'A,B;C'.",
        )
    if (input is None) != (output is None):
        raise ConfigError(
            "output_missing" if output is None else "output_unused",
            "--input needs an --output." if output is None else "--output belongs to --input.",
            "E.g. --output recommendations.parquet." if output is None else "Use --json and redirect the answer.",
        )
    if history is not None and of_files:
        raise ConfigError(
            "flag_unused", f"{', '.join(of_files)} says how to read --input, and there is none.", "Leave it out."
        )
    if input is not None and output is not None:
        output_format(output)
        if input.exists() and output.exists() and input.samefile(output):
            raise ConfigError("output_is_input", f"--output would replace the input {input}.", "Name another file.")


def _items(flag: str, value: str | None, item_column: str | None) -> list[str] | None:
    """Ids from `A,B` or from a file; a word that looks like a file must be one."""
    from ..core.errors import ConfigError
    from ..data.readers import SUFFIXES
    from ..engine.history_files import read_item_ids

    if value is None:
        return None
    path = Path(value)
    if "," not in value and (path.suffix.lower() in SUFFIXES or path.is_file()):
        return read_item_ids(path, item_column)
    ids = [item.strip() for item in value.split(",") if item.strip()]
    if not ids:
        raise ConfigError("items_empty", f"{flag} names no item.", "Write ids as A,B, or name a file.")
    return ids


def _load(
    model: Path, batch_size: int, score_rule: ScoreRule, options: ModelOptions, backend: HardwareBackend
) -> Recommender:
    from ..engine.engine import EngineConfig
    from ..engine.recommender import Recommender
    from ..engine.scheduler import BatchLimits

    config = EngineConfig(score_rule=score_rule, limits=BatchLimits(max_requests=batch_size), model=options)
    return Recommender.from_pretrained(model, backend=backend, config=config)


def _warn_unknown_filters(recommender: Recommender, template: RecommendRequest) -> None:
    """Filter ids that the catalog does not know change nothing, which is seldom meant."""
    for flag, ids in (("--exclude", template.exclude), ("--allow", template.allow or ())):
        missing = [item for item in ids if recommender.row_of(item) is None]
        if missing:
            _console().print(
                f"warning: {len(missing):,} of {len(ids):,} items in {flag} are not in the catalog, "
                f"the first is '{missing[0]}'.",
                markup=False,
                highlight=False,
            )


def _run(
    recommender: Recommender, source: Any, output: Path, template: RecommendRequest, batch_size: int
) -> FileSummary:
    from ..core.console import progress_bar
    from ..engine.files import recommend_file

    with progress_bar() as progress:
        task = progress.add_task("recommend", total=source.num_users)
        return recommend_file(
            recommender,
            source,
            output,
            template,
            window=8 * batch_size,  # several batches, so that users of like length can share one
            on_progress=lambda count: progress.advance(task, count),
        )


def _show_answer(request: RecommendRequest, answer: Recommendation, recommender: Recommender) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console, catalog = Console(), recommender.catalog
    past = Table(title="History, oldest first", title_justify="left")
    past.add_column("basket", justify="right")
    past.add_column("item")
    past.add_column("name", overflow="fold")
    for number, entry in enumerate(request.history, 1):
        for item in [entry] if isinstance(entry, str) else entry:
            row = recommender.row_of(item)
            name = "[yellow]not in the catalog[/]" if row is None else escape(catalog.names[row] or "")
            past.add_row(str(number), escape(item), name)
    if request.history:
        console.print(past)
    by = (
        f"score rule {answer.score_rule}" if answer.source == "model" else "popularity: no item of the history is known"
    )
    table = Table(title=f"Recommended ({by})", title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("item")
    table.add_column("name", overflow="fold")
    table.add_column("score" if answer.source == "model" else "count", justify="right")
    table.add_column("SID")
    for rank, found in enumerate(answer.items, 1):
        score = f"{found.score:.3f}" if answer.source == "model" else f"{found.score:,.0f}"
        table.add_row(str(rank), escape(found.item_id), escape(found.name or ""), score, escape(found.sid))
    console.print(table if answer.items else "No item may be recommended: all are excluded.")


def _show_summary(summary: FileSummary, output: Path, recommender: Recommender) -> None:
    lines = [f"{summary.users:,} users, {summary.rows:,} recommendations"]
    if summary.popularity:
        lines.append(f"{summary.popularity:,} users without any known item got the most popular ones")
    if summary.empty:
        lines.append(f"{summary.empty:,} users got nothing: no item was allowed for them")
    if summary.unknown_entries:
        shown = ", ".join(f"{item} ({count:,}×)" for item, count in summary.unknown_examples.items())
        lines.append(
            f"{summary.unknown_entries:,} of {summary.history_entries:,} history entries were dropped: "
            f"{summary.unknown_items:,} items are not in the catalog, such as {shown}"
        )
    if summary.unknown_entries == summary.history_entries > 0:
        lines.append(
            f"No item of any history is known: is the item column right? Ids of the catalog look like "
            f"'{recommender.catalog.item_ids[0]}'"
        )
    for line in [*lines, f"wrote {output}"]:
        _console().print(line, markup=False, highlight=False)


def _console() -> Any:
    from ..core.console import status_console

    return status_console()
