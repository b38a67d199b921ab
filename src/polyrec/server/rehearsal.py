"""A worker's work on a request, done over and over while it waits for the engine's answer to a lone one.

On a machine that others share, and where memory is far away, a core that has waited for some milliseconds does its next work
at half its pace or less: code and tables have left its caches. A worker that does not sleep anyway can keep them there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import orjson
import uvicorn.server

from .app import ASIDE_FROM, create_app
from .channel import Answers, Ask, Status, packed, take_messages
from .http import uvicorn_config
from .metrics import ServerMetrics
from .protocol import HttpProtocol
from .remote import RemoteLoop
from .schema import MAX_ITEM_CHARS
from .settings import ServerSettings
from .state import READY, ServerState, Service


class Rehearsal:
    """A connection that leads nowhere, to an app of its own, and an engine that finds the front's sample. Each call begins the
    way in or the way out of a request, which the event loop then goes: an answer that comes meanwhile waits for half of it."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        history, n, self._found = service.front.sample()
        history = [item for item in history if 0 < len(item) <= MAX_ITEM_CHARS]
        content = orjson.dumps({"history": history, "n": min(n, settings.max_beam_width)})
        while len(content) > min(ASIDE_FROM, settings.max_body_bytes) and len(history) > 1:
            history = history[::2]
            content = orjson.dumps({"history": history, "n": min(n, settings.max_beam_width)})
        self._request = (
            b"POST /v1/recommend HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (
                len(content),
                content,
            )
        )
        self._asked: int | None = None
        self._engine = RemoteLoop()
        self._engine.connect(self)
        self._engine.status = Status(READY, True, 0, {})
        state = ServerState("rehearsal", stage=READY, service=dataclasses.replace(service, loop=self._engine))
        open_to_all = settings.model_copy(update={"api_key": None})
        app = create_app(state, open_to_all, _NobodyCounts(state, settings.max_queue))
        config = uvicorn_config(app, settings)
        config.load()
        self._protocol = HttpProtocol(config, uvicorn.server.ServerState(), {}, asyncio.get_running_loop())
        self._protocol.logger = _SILENT
        self._nowhere = Nowhere()
        self._protocol.connection_made(self._nowhere)

    def __call__(self) -> None:
        """In the event loop's thread."""
        if self._asked is not None:
            number, self._asked = self._asked, None
            take_messages(bytearray(packed(Answers([(number, self._found)], None))), self._engine.take)
        elif (cycle := self._protocol.cycle) is None or cycle.response_complete:
            self._protocol.data_received(self._request)

    @property
    def written(self) -> int:
        """Bytes of answers so far."""
        return self._nowhere.written

    def send(self, message: Any) -> None:
        """A channel's, to the engine."""
        packed(message)
        if isinstance(message, Ask):
            self._asked = message.number


class Nowhere(asyncio.Transport):
    """The other end of a connection without one."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def write(self, data: Any) -> None:
        """Forgets it."""
        self.written += len(data)

    def is_closing(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """Nothing to do, as with the next two."""

    def pause_reading(self) -> None:
        """Nothing comes."""

    def resume_reading(self) -> None:
        """Nothing comes."""


class _NobodyCounts(ServerMetrics):
    """For answers that nobody gets: neither counted nor logged."""

    def note_later(self, note: Callable[[], None]) -> None:
        """Forgets it."""


_SILENT = logging.Logger("rehearsal")  # of a request that the end of the process cuts short nobody need know
_SILENT.disabled = True
