"""The outermost layer of the app: a request id, the time taken, one log line and the metrics for every request."""

from __future__ import annotations

import functools
import logging
import random
import re
import time
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .logs import FIELDS, LOGGER
from .metrics import ServerMetrics
from .protocol import WHOLE

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_NONE: dict[str, Any] = {}
_QUIET = ("/health", "/ready", "/metrics")  # asked every few seconds by machines: logged at debug


class RequestContext:
    """Wraps the app, so that answers of its error handlers are counted and carry the id too.

    Leaves `request_id` in the scope's state; the routes put `code` (an error's) and `fields` (for the log) there.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._logger = logging.getLogger(LOGGER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request from its arrival to the end of its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(scope)
        status = 500

        id_header = (b"x-request-id", request_id.encode())
        answer_whole = scope.get("extensions", _NONE).get(WHOLE)
        held: Message | None = None

        def answer_whole_with_id(scope: Scope, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
            nonlocal status
            if not answer_whole(scope, (*headers, id_header), body):
                return False
            status = 200
            return True

        async def send_with_id(message: Message) -> None:
            nonlocal status, held
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
                if status == 200 and answer_whole is not None:
                    held = message  # until it is known whether all else comes at once
                    return
            elif held is not None:
                start, held = held, None
                if _is_whole(start, message) and answer_whole(scope, start["headers"], message["body"]):
                    return
                await send(start)
            await send(message)

        if answer_whole is not None:
            scope["extensions"][WHOLE] = answer_whole_with_id
        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._metrics.note_later(functools.partial(self._note, scope, status, time.perf_counter() - start))

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        self._metrics.in_flight.dec()
        self._metrics.observe(scope["path"], status, seconds)
        if (code := scope["state"].get("code")) is not None:
            self._metrics.errors.labels(code).inc()
        self._log(scope, status, seconds)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
        level = logging.ERROR if status >= 500 and status != 503 else level
        state, client = scope["state"], scope.get("client")
        fields = {
            "request_id": state["request_id"],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round(seconds * 1000, 3),
            "client": client[0] if client else None,
            **({"code": state["code"]} if "code" in state else {}),
            **state.get("fields", {}),
        }
        self._logger.log(level, "request", extra={FIELDS: fields})


def _is_whole(start: Message, body: Message) -> bool:
    return (
        not body.get("more_body", False) and (b"content-length", b"%d" % len(body.get("body", b""))) in start["headers"]
    )


def _request_id(scope: Scope) -> str:
    """The client's id when it is short and plain (it goes into logs and a header), else a new one."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"
