"""Structured logs: one JSON object a line on standard error; uvicorn's own lines take the same form."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

LOGGER = "polyrec.server"
FIELDS = "fields"  # `logger.info(message, extra={FIELDS: {...}})` adds these keys to the line


class JsonFormatter(logging.Formatter):
    """time (UTC, ISO 8601), level, logger, message, then the record's own fields; a traceback under `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def configure_logs(level: str) -> None:
    """Sends the server's and uvicorn's records to standard error as JSON. Called once, by the process that serves."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("polyrec", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").handlers = [handler]
