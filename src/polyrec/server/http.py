"""How uvicorn serves the application, in whichever process."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from .logs import LOGGER
from .protocol import HttpProtocol
from .settings import ServerSettings

T = TypeVar("T")
BACKLOG = 2048  # connections that wait to be accepted


def uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    """Without uvicorn's own logs and limits."""
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        # Every request has its own deadline; this only ends clients that read their answer too slowly.
        timeout_graceful_shutdown=math.ceil(settings.timeout) + 5,
    )


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, by the loop that uvicorn takes too."""
    try:
        import uvloop
    except ImportError:  # not built for every platform; pyproject.toml says for which
        logging.getLogger(LOGGER).warning("uvloop is not installed: asyncio's slower loop runs")
        return asyncio.run(main)
    return uvloop.run(main)
