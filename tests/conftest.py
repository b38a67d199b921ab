"""Shared by all tests: helper modules beside the tests are importable, and what a test does to the logs ends with it."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE / "engine"), str(HERE / "hardware")]
LOGGERS = ("polyrec", "uvicorn", "py.warnings")


def pytest_terminal_summary(terminalreporter):
    """Skips aloud: each reason once, where pytest's -rs has a line for each place in the code."""
    skipped = (report.longrepr for report in terminalreporter.stats.get("skipped", ()))
    reasons = Counter(longrepr[2].removeprefix("Skipped: ") for longrepr in skipped)
    if reasons:
        terminalreporter.section("skipped")
        for reason, num in reasons.most_common():
            terminalreporter.write_line(f"{num:5} {reason}")


@pytest.fixture(autouse=True)
def logs_as_they_were():
    """A server, or a command, sends its records to handlers of its own; the next test must not find them there."""
    before = [
        (logger, logger.handlers[:], logger.propagate, logger.level) for logger in map(logging.getLogger, LOGGERS)
    ]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    logging.captureWarnings(False)
