"""HTTP below the application: offers of other protocols, heads without an end, what is not HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn.server
from processes import WORKERS, ServerProcess, eventually, fake_server

from polyrec.server.context import RequestContext
from polyrec.server.http import run_loop, uvicorn_config
from polyrec.server.metrics import ServerMetrics
from polyrec.server.protocol import HEAD_BYTES, HttpProtocol
from polyrec.server.rehearsal import Nowhere
from polyrec.server.settings import ServerSettings
from polyrec.server.state import ServerState

BODY = json.dumps({"history": ["i1"], "n": 3}).encode()
CHUNKED = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (9, BODY[:9], len(BODY) - 9, BODY[9:])
RECOMMEND = b"POST /v1/recommend HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nX-Empty:\r\n"
# What Java's HttpClient sends with its first request.
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
WEBSOCKET = b"Upgrade: websocket\r\nConnection: keep-alive, upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
CLOSING = b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n"
SIZED = b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
IN_CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED


@pytest.fixture(scope="module", params=WORKERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with fake_server(tmp_path_factory.mktemp("model"), http_workers=request.param) as server:
        yield server


@contextmanager
def connected(server: ServerProcess) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def answers(connection: socket.socket, num: int) -> list[tuple[int, bytes]]:
    """Status and body of the next answers, which have a length each."""
    found = []
    with connection.makefile("rb") as stream:
        for _ in range(num):
            status = int(stream.readline().split()[1])
            length = 0
            while line := stream.readline().strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            found.append((status, stream.read(length)))
    return found


@pytest.mark.parametrize("piece", [1, 7, 200, 100_000])
@pytest.mark.parametrize("body", [SIZED, IN_CHUNKS], ids=["sized", "chunked"])
@pytest.mark.parametrize("offer", [H2C, WEBSOCKET, CLOSING], ids=["h2c", "websocket", "closing"])
def test_an_offered_upgrade_is_ignored(server: ServerProcess, offer: bytes, body: bytes, piece: int) -> None:
    """The body arrives whole, requests behind it are served, and nothing is said about it."""
    before = server.errors().count('"warning"')
    request = RECOMMEND + offer + body
    stream = request if offer is CLOSING else request * 2 + b"GET /health HTTP/1.1\r\n" + offer + b"\r\n" + request
    with connected(server) as connection:
        for place in range(0, len(stream), piece):
            connection.sendall(stream[place : place + piece])
        found = answers(connection, 1 if offer is CLOSING else 4)
    assert [status for status, _ in found] == [200] * len(found)
    for _, content in found[:2]:
        assert [item["item_id"] for item in json.loads(content)["items"]] == ["i0", "i1", "i2"]
    assert server.errors().count('"warning"') == before


class Writes(Nowhere):
    """Keeps what is written, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def plain(scope: Any, receive: Any, send: Any) -> None:
    """Answers as its path says."""
    status, parts = (404 if scope["path"] == "/missing" else 200), [b"one", b"two"]
    parts = parts if scope["path"] == "/parts" else [b"".join(parts)]
    headers = [(b"content-length", b"6")] if scope["path"] != "/chunks" else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for number, part in enumerate(parts):
        await send({"type": "http.response.body", "body": part, "more_body": number + 1 < len(parts)})


@pytest.mark.parametrize(
    ("request_", "num_writes", "end"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 1, b"\r\n\r\nonetwo"),
        (b"GET / HTTP/1.1\r\nX-Request-Id: mine\r\n\r\n", 1, b"\r\nx-request-id: mine\r\n\r\nonetwo"),
        (b"GET /missing HTTP/1.1\r\n\r\n", 2, b"onetwo"),
        (b"GET /parts HTTP/1.1\r\n\r\n", 3, b"two"),
        (b"GET /chunks HTTP/1.1\r\n\r\n", 2, b"6\r\nonetwo\r\n0\r\n\r\n"),
        (b"GET / HTTP/1.0\r\n\r\n", 2, b"onetwo"),
        (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", 2, b"onetwo"),
        (b"HEAD / HTTP/1.1\r\n\r\n", 1, b"\r\n\r\n"),
    ],
    ids=lambda value: value.split(b" HTTP")[0].decode() if isinstance(value, bytes) and b" HTTP" in value else "",
)
def test_a_plain_answer_is_written_at_once(request_: bytes, num_writes: int, end: bytes) -> None:
    """And says what uvicorn would; anything else is written by uvicorn. The connection serves the next request alike."""

    async def run() -> None:
        state = ServerState("model")
        app = RequestContext(plain, ServerMetrics(state, 1))
        config = uvicorn_config(app, ServerSettings())
        config.load()
        own, uvicorns = Writes(), Writes()
        lines = []
        for transport, is_own in ((own, True), (uvicorns, False)):
            server_state = uvicorn.server.ServerState()
            server_state.default_headers = [(b"date", b"today")]
            protocol = HttpProtocol(config, server_state, {}, asyncio.get_running_loop())
            if not is_own:
                protocol.answer_whole = lambda *args: False  # type: ignore[method-assign]
            protocol.connection_made(transport)
            for _ in range(2):
                protocol.data_received(request_)
                await asyncio.sleep(0.01)
                if transport.is_closed:
                    break
            answered = b"".join(transport.writes)
            lines.append([line for line in answered.split(b"\r\n") if b"x-request-id" not in line])
            assert server_state.total_requests == (1 if transport.is_closed else 2)
        assert lines[0] == lines[1]
        assert len(own.writes) == num_writes * (1 if own.is_closed else 2)
        assert own.writes[-1].endswith(end)
        is_plain = end.endswith(b"\r\n\r\nonetwo")
        assert (own.is_closed, len(uvicorns.writes) > len(own.writes)) == (uvicorns.is_closed, is_plain)

    asyncio.run(run())


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("done", [0, 1])
def test_the_served_request_learns_that_its_client_is_gone(num: int, done: int) -> None:
    """Whatever came behind it, which is not begun any more."""
    begun: list[str] = []
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        assert (await receive())["type"] == "http.request"
        if scope["path"] == "/0" and done:
            await plain(scope, receive, send)
            return
        told.append((await receive())["type"])
        await plain(scope, receive, send)  # to nobody, and no error

    async def run() -> None:
        config = uvicorn_config(app, ServerSettings())
        config.load()
        protocol = HttpProtocol(config, uvicorn.server.ServerState(), {}, asyncio.get_running_loop())
        transport = Gone()
        protocol.connection_made(transport)
        protocol.data_received(b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % number for number in range(num + done)))
        await asyncio.sleep(0.01)
        transport.is_gone = True
        protocol.connection_lost(ConnectionResetError())
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert begun == [f"/{number}" for number in range(done + 1)]
    assert told == ["http.disconnect"]


class Gone(Writes):
    """A connection that ends, and to which then nothing may be written."""

    is_gone = False

    def write(self, data: bytes) -> None:
        assert not self.is_gone, "the handler is closed"
        super().write(data)

    def is_closing(self) -> bool:
        return self.is_gone


async def large(scope: Any, receive: Any, send: Any) -> None:
    """Answers with more than any socket takes at once."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(LARGE))]})
    await send({"type": "http.response.body", "body": LARGE})


LARGE = bytes(range(256)) * (1 << 16)


@pytest.mark.parametrize("taken", [None, BlockingIOError, TimeoutError, 5, 1000])
@pytest.mark.parametrize("run_in_loop", [asyncio.run, run_loop], ids=["asyncio", "uvloop"])
def test_an_answer_of_which_the_socket_takes_a_part(
    monkeypatch: pytest.MonkeyPatch, run_in_loop: Callable[..., Any], taken: int | type[OSError] | None
) -> None:
    """The rest follows, and the next answer after it. taken: bytes of each, or how it refuses (None: as it is)."""

    def write(to: int, both: tuple[bytes, bytes]) -> int:
        if isinstance(taken, int):
            return os.write(to, b"".join(both)[:taken])
        assert taken is not None
        raise taken

    if taken is not None:
        monkeypatch.setattr(os, "writev", write)

    async def run() -> None:
        config = uvicorn_config(RequestContext(large, ServerMetrics(ServerState("model"), 1)), ServerSettings())
        config.load()
        loop, state = asyncio.get_running_loop(), uvicorn.server.ServerState()
        served = await loop.create_server(lambda: HttpProtocol(config, state, {}, loop), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*served.sockets[0].getsockname()[:2])
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await asyncio.sleep(0.05)
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(LARGE)) == LARGE
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        writer.transport.abort()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        assert not state.connections
        served.close()

    run_in_loop(run())


def test_of_pipelined_requests_each_has_its_answer(server: ServerProcess) -> None:
    with connected(server) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\nGET /nothing HTTP/1.1\r\n\r\n"
            + RECOMMEND
            + SIZED
        )
        found = answers(connection, 4)
    assert [status for status, _ in found] == [200, 200, 404, 200]
    assert [
        key for _, content in found for key in ("status", "object", "error", "items") if key in json.loads(content)
    ] == [
        "status",
        "object",
        "error",
        "items",
    ]


def test_a_head_of_many_bytes(server: ServerProcess) -> None:
    start = RECOMMEND + b"X-Long: "
    with connected(server) as connection:
        connection.sendall(start + b"a" * (HEAD_BYTES - len(start)))
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(20)
        connection.sendall(b"a")
        assert answers(connection, 1)[0][0] == 431
        assert connection.recv(1) == b"", "it is closed"


@pytest.mark.parametrize("offer", [b"", H2C])
def test_a_large_head_and_a_large_body_in_one_go(server: ServerProcess, offer: bytes) -> None:
    padding = b" " * 150_000
    body = b"Content-Length: %d\r\n\r\n%b" % (len(BODY) + len(padding), BODY + padding)
    long = b"X-Long: %b\r\n" % (b"a" * (HEAD_BYTES - 2000))
    with connected(server) as connection:
        connection.sendall((RECOMMEND + offer + long + body) * 2)
        assert [status for status, _ in answers(connection, 2)] == [200, 200]


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (RECOMMEND + b"X-Long: ", b"a" * 1000),  # one header
        (RECOMMEND, b"X-Another: a\r\n" * 100),  # many headers
        (b"GET /", b"a" * 1000),
        (RECOMMEND + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Trailer: a\r\n" * 100),
        (RECOMMEND + b"Transfer-Encoding: chunked\r\n\r\n5;a=", b"a" * 1000),
        (RECOMMEND + H2C + b"X-Long: ", b"a" * 1000),
    ],
    ids=["header", "headers", "path", "trailers", "extension", "offer"],
)
def test_heads_without_an_end(server: ServerProcess, start: bytes, piece: bytes) -> None:
    def refused() -> bool:
        try:
            connection.sendall(piece)
        except OSError:
            return True
        return False

    with connected(server) as connection:
        connection.sendall(start)
        eventually(refused, "it is closed")


@pytest.mark.parametrize(
    "stream",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,  # TLS
        b"BREW /health HTTP/1.1\r\nHost: here\r\n\r\n",
        b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: elsewhere\r\n\r\n",
        b"CONNECT http://elsewhere/ HTTP/1.1\r\nHost: elsewhere\r\n\r\n",
    ],
    ids=["tls", "method", "connect", "connect_url"],
)
def test_what_is_not_http(server: ServerProcess, stream: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(stream)
        assert answers(connection, 1) == [(400, b"Invalid HTTP request received.")]
