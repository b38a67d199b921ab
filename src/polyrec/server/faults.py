"""Every refusal and failure as the same JSON: {"error": {"code", "message", "remedy", "request_id"}}."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from ..core.errors import PolyrecError, RequestError
from .schema import ErrorAnswer, ErrorDetail
from .state import ServerState

_MAX_RETRY_AFTER = 60


Handler = Callable[[Request, Exception], Awaitable[Response]]


class FaultHandlers(NamedTuple):
    """What answers a user's fault, and a mistake of our own."""

    refused: Handler
    our_mistake: Handler


def add_fault_handlers(app: FastAPI, state: ServerState) -> FaultHandlers:
    """Registers the handlers: user's faults, unknown routes and methods, and our own mistakes."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, PolyrecError)
        status = error.status if isinstance(error, RequestError) else 500
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        if status in (429, 503):
            headers["Retry-After"] = str(retry_after(state))
        return _answer(request, status, error.code, error.message, error.remedy, headers)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        method, path = request.method, request.url.path[:200]
        if error.status_code == 404:
            told = "path_unknown", f"There is nothing at {path}.", "docs/server.md lists the endpoints."
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            told = "method_not_allowed", f"{path} does not answer {method}.", f"Use {allowed}."
        else:
            told = "http_error", str(error.detail), ""
        return _answer(request, error.status_code, *told, error.headers or {})

    async def our_mistake(request: Request, error: Exception) -> Response:
        message = "The server failed on this request; its log has the details under the request id."
        return _answer(request, 500, "internal_error", message, "Report it with the request id.", {})

    app.add_exception_handler(PolyrecError, refused)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(Exception, our_mistake)
    return FaultHandlers(refused, our_mistake)


def retry_after(state: ServerState) -> int:
    """Whole seconds until the queue as it is now is worked off, from the mean time per request so far."""
    if state.service is None:
        return 1
    stats = state.service.loop.stats
    per_request = stats.get("busy_seconds", 0.0) / max(stats.get("requests", 0), 1)
    return min(max(math.ceil(state.service.loop.depth * per_request), 1), _MAX_RETRY_AFTER)


def _answer(
    request: Request, status: int, code: str, message: str, remedy: str, headers: Mapping[str, str]
) -> Response:
    request.scope["state"]["code"] = code
    request_id = request.scope["state"]["request_id"]
    detail = ErrorDetail(code=code, message=message, remedy=remedy, request_id=request_id)
    content = ErrorAnswer(error=detail).model_dump_json()
    return Response(content, status, headers=dict(headers), media_type="application/json")
