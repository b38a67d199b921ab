"""Shared by all tests: helper modules beside the tests are importable, and what a test does to the logs ends with it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE / "engine"), str(HERE / "hardware")]
LOGGERS = ("polyrec", "uvicorn", "py.warnings")


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
