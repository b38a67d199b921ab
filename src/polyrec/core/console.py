"""What a person sees while work is going on: progress bars and tables, on standard error so that output stays clean."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn


def status_console() -> Console:
    """The console for messages and progress: standard error."""
    return Console(stderr=True)


def progress_bar(*extra_columns: str) -> Progress:
    """A progress display `description bar n/m time-left extra…`; extra columns are rich markup over task.fields."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        *(TextColumn(column) for column in extra_columns),
        console=status_console(),
    )
