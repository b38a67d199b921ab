"""Profiles of a running server: `POST /v1/profile/start` and `/v1/profile/stop`, where `--profile-dir` allows them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter
from pydantic import BaseModel

from ..core.errors import ConfigError, RequestError
from ..core.files import make_parent
from .logs import FIELDS, LOGGER

if TYPE_CHECKING:
    from ..engine.loop import EngineLoop
    from ..engine.trace import Tracer
    from .remote import RemoteProfile
    from .state import Service


@dataclass(frozen=True)
class Profile:
    """The tracer of a loop's engine, driven from other threads."""

    loop: EngineLoop
    tracer: Tracer

    def start(self) -> Future[None]:
        """Between two batches."""
        return self.loop.call(self.tracer.start)

    def stop(self) -> Future[Path]:
        """Between two batches, which wait while the trace is written; the future names its file."""
        return self.loop.call(self.tracer.stop)

    def end(self) -> None:
        """Before the loop is drained: has a profile that still runs written, and the log name its file."""
        if self.loop.is_alive:
            self.loop.call(self.tracer.end).add_done_callback(_log_end)


class ProfileAnswer(BaseModel):
    """Whether a profile runs now, and the file of the one that has ended."""

    running: bool
    file: str | None = None


def add_profile_routes(router: APIRouter, ready_service: Callable[[], Service]) -> None:
    """No deadline holds for them: a long trace takes long to write."""

    @router.post("/v1/profile/start")
    async def start() -> ProfileAnswer:
        await asyncio.wrap_future(_profile_of(ready_service()).start())
        return ProfileAnswer(running=True)

    @router.post("/v1/profile/stop")
    async def stop() -> ProfileAnswer:
        path = await asyncio.wrap_future(_profile_of(ready_service()).stop())
        return ProfileAnswer(running=False, file=str(path))


def writable_folder(folder: Path) -> Path:
    """The absolute path of a folder that traces can be written to, made if need be. Errors: `path_unusable`."""
    folder = folder.resolve()
    make_parent(folder / "trace.json")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("path_unusable", f"{folder} cannot be written.", "Name another --profile-dir.")
    return folder


def _log_end(ended: Future[Path | None]) -> None:
    if (error := ended.exception()) is not None:
        logging.getLogger(LOGGER).error("the profile that ran at the end is lost: %s", error)
    elif (path := ended.result()) is not None:
        logging.getLogger(LOGGER).info("profile", extra={FIELDS: {"file": str(path)}})


def _profile_of(service: Service) -> Profile | RemoteProfile:
    if service.profile is None:
        raise RequestError(
            "profile_disabled", "This server takes no profiles.", "Start it with --profile-dir DIR.", status=404
        )
    return service.profile
