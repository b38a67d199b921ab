"""The routes: read and check a body, queue it for the engine's own thread, wait without blocking others, answer."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import __version__
from ..core.errors import PolyrecError, RequestError
from ..core.request import CardAnswer, Recommendation
from .auth import KeyCheck
from .chat_schema import ChatAnswer, ChatBody
from .context import RequestContext
from .faults import FaultHandlers, add_fault_handlers, retry_after
from .metrics import ServerMetrics
from .profile import add_profile_routes
from .protocol import WHOLE
from .schema import Body, ErrorAnswer, RecommendAnswer, RecommendBody, encode_answer, parse_body, parse_recommend
from .settings import ServerSettings
from .state import ENGINE_STOPPED, ServerState, Service
from .waiting import Deadline, read_body, wait_answer

if TYPE_CHECKING:
    from ..engine.front import Prepared
    from ..engine.searches import SearchResult

P = ParamSpec("P")
T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
ASIDE_FROM = 32_768  # bytes: some 1,000 items
_SCHEMAS = "#/components/schemas/{model}"


def create_app(state: ServerState, settings: ServerSettings, metrics: ServerMetrics | None = None) -> ASGIApp:
    """The whole HTTP application over a state that becomes ready when the model is loaded."""
    metrics = metrics or ServerMetrics(state, settings.max_queue)
    app = FastAPI(title="Polyrec", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    check = KeyCheck(key)
    guarded = APIRouter(dependencies=[Depends(check)])
    recommend = _add_recommend(guarded, state, settings, metrics)
    _add_chat(guarded, state, settings, metrics)
    _add_models(guarded, state)
    _add_metrics(guarded, metrics)
    add_profile_routes(guarded, functools.partial(_ready_service, state))
    app.include_router(guarded)
    _add_probes(app, state)
    handlers = add_fault_handlers(app, state)
    _describe_bodies(app)
    return RequestContext(Direct(app, "/v1/recommend", recommend, check, handlers), metrics)


class Direct:
    """Calls the endpoint that is asked thousands of times a second without FastAPI's layers, whose work for a request
    is 0.1 ms and, right after a pause, twice that. FastAPI has the same endpoint, for other methods and the description."""

    def __init__(self, app: ASGIApp, path: str, endpoint: Endpoint, check: KeyCheck, handlers: FaultHandlers) -> None:
        self._app, self._path, self._endpoint, self._check, self._handlers = app, path, endpoint, check, handlers
        self._guarded = ServerErrorMiddleware(self._call, handlers.our_mistake)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        is_direct = scope["type"] == "http" and scope["path"] == self._path and scope["method"] == "POST"
        await (self._guarded if is_direct else self._app)(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            await self._check(request)
            response = await self._endpoint(request)
        except PolyrecError as error:
            response = await self._handlers.refused(request, error)
        await response(scope, receive, send)


def _add_recommend(router: APIRouter, state: ServerState, settings: ServerSettings, metrics: ServerMetrics) -> Endpoint:
    @router.post("/v1/recommend", openapi_extra=_takes(RecommendBody), responses=_answers(RecommendAnswer))
    async def recommend(request: Request) -> Response:
        deadline = Deadline(settings.timeout)
        service = _ready_service(state)
        content = await read_body(request, settings.max_body_bytes, deadline)
        asked, timeout_ms = parse_recommend(content, settings.max_beam_width)
        deadline.shorten(timeout_ms)
        prepared = await _aside(len(content), service.front.prepare, asked)
        answer = await _answer(service, prepared, request, deadline, service.front.finish_as_cards)
        timing_ms = round(deadline.elapsed * 1000, 3)
        encoded = encode_answer(answer, request_id=request.scope["state"]["request_id"], timing_ms=timing_ms)
        return Noted(encoded, media_type="application/json", note=functools.partial(_note, request, metrics, answer))

    return recommend


def _add_chat(router: APIRouter, state: ServerState, settings: ServerSettings, metrics: ServerMetrics) -> None:
    @router.post("/v1/chat/completions", openapi_extra=_takes(ChatBody), responses=_answers(ChatAnswer))
    async def chat_completions(request: Request) -> Response:
        deadline = Deadline(settings.timeout)
        service = _ready_service(state)
        content = await read_body(request, settings.max_body_bytes, deadline)
        body = parse_body(ChatBody, content)
        body.check(settings.max_beam_width, state.model_name, service.layout.depth)
        deadline.shorten(body.timeout_ms)
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        token_ids = await _aside(len(content), service.chat.token_ids, messages)
        prepared = service.front.prepare_prompt(token_ids, body.n, body.beam_width)
        answer = await _answer(service, prepared, request, deadline, service.front.finish)
        _note(request, metrics, answer)
        return _json(
            ChatAnswer.of(
                answer,
                request_id=request.state.request_id,
                model=state.model_name,
                num_prompt=len(token_ids),
                depth=service.layout.depth,
            )
        )


async def _aside(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls at once what takes under a millisecond, and the rest in another thread, so that nobody waits for it. size: of the
    body, in bytes; going to the other thread and back costs as much as 60 items do."""
    if size <= ASIDE_FROM:
        return function(*args, **kwargs)
    return await run_in_threadpool(function, *args, **kwargs)


async def _answer(
    service: Service,
    prepared: Prepared | Recommendation,
    request: Request,
    deadline: Deadline,
    finish: Callable[[Prepared, SearchResult], T],
) -> T | Recommendation:
    """Has the engine search, and makes the answer here, so that the engine's thread need not."""
    if isinstance(prepared, Recommendation):
        return prepared
    found = await wait_answer(service.loop.search(prepared.search, deadline.at), request, deadline)
    return finish(prepared, found)


def _add_models(router: APIRouter, state: ServerState) -> None:
    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": state.model_name, "object": "model", "created": state.created, "owned_by": "polyrec"}
        return {"object": "list", "data": [model]}


def _add_metrics(router: APIRouter, metrics: ServerMetrics) -> None:
    @router.get("/metrics")
    async def metrics_text() -> Response:
        return Response(await metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_probes(app: FastAPI, state: ServerState) -> None:
    """For an orchestrator: /health says the process lives, /ready that it answers. Neither asks for the key."""

    @app.get("/health")
    async def health() -> Response:
        status = ENGINE_STOPPED if state.engine_stopped else "ok"
        return _json(_Health(status=status, version=__version__), 503 if state.engine_stopped else 200)

    @app.get("/ready")
    async def ready() -> Response:
        stage = _Stage(stage=ENGINE_STOPPED if state.engine_stopped else state.stage)
        return _json(stage) if state.ready else _json(stage, 503, {"Retry-After": str(retry_after(state))})


class _Health(BaseModel):
    status: str
    version: str


class _Stage(BaseModel):
    stage: str


def _ready_service(state: ServerState) -> Service:
    if state.service is None:  # while draining, requests that still come in are answered
        stage = state.stage
        raise RequestError("not_ready", f"The server is not ready yet: {stage}.", "Wait for /ready.", status=503)
    if state.engine_stopped:
        raise RequestError(
            ENGINE_STOPPED, "The engine's thread has ended.", "Restart the server; its log says why.", status=503
        )
    return state.service


def _note(request: Request, metrics: ServerMetrics, answer: Recommendation | CardAnswer) -> None:
    """Counts an answer, in a moment, and leaves its figures for the log line."""
    metrics.note_later(functools.partial(_count, metrics, answer))
    request.scope["state"]["fields"] = {
        "num_items": len(answer.items),
        "num_unknown": len(answer.unknown_items),
        "source": answer.source,
    }


class Noted(Response):
    """Is sent in few steps where that can be. It is noted when it is sent, so that its client need not wait for that, or when
    its client is gone."""

    def __init__(self, content: bytes, media_type: str, note: Callable[[], None]) -> None:
        super().__init__(content, media_type=media_type)
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer_whole = scope.get("extensions", {}).get(WHOLE)
            if answer_whole is None or not answer_whole(scope, self.raw_headers, self.body):
                await super().__call__(scope, receive, send)
        finally:
            self._note()


def _count(metrics: ServerMetrics, answer: Recommendation | CardAnswer) -> None:
    metrics.answers.labels(answer.source).inc()
    metrics.items.inc(len(answer.items))
    metrics.unknown_items.inc(len(answer.unknown_items))


def _json(value: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return _sent(value.model_dump_json(), status, headers)


def _sent(content: str | bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(content, status, headers=headers, media_type="application/json")


def _takes(body: type[Body]) -> dict[str, Any]:
    """Bodies are read by hand (limits, deadline, own errors), so the OpenAPI page has to be told about them."""
    schema = {"$ref": _SCHEMAS.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _answers(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model}, "4XX": {"model": ErrorAnswer}}


def _describe_bodies(app: FastAPI) -> None:
    """Adds the bodies' schemas to /openapi.json."""
    _, definitions = models_json_schema(
        [(RecommendBody, "validation"), (ChatBody, "validation")], ref_template=_SCHEMAS
    )
    described = app.openapi

    def openapi() -> dict[str, Any]:
        schema = described()
        schema["components"]["schemas"].update(definitions["$defs"])
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
