"""Warnings on the terminal: one line each on standard error, `warning [code] text`, as the hardware layer logs them."""

from __future__ import annotations

import logging

from rich.console import Console


class WarningLines(logging.Handler):
    """Prints each different warning once: what is chosen twice in one command need not be told twice."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Texts keep their brackets: `[code]` is no markup."""
        text = record.getMessage()
        if text in self._told:
            return
        self._told.add(text)
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print("[yellow]warning[/] ", end="")
        console.print(text, markup=False)


def show_warnings() -> None:
    """Called once, by the process of a command. The handler hangs where the server's JSON lines replace it."""
    logging.getLogger("polyrec").addHandler(WarningLines())
