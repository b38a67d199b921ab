"""HTTP/1.1 on a connection: uvicorn's protocol over httptools, which here ignores offered upgrades and bounds what it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

WHOLE = "polyrec.whole_answer"  # the scope's extension that is `HttpProtocol.answer_whole`
HEAD_BYTES = 64 * 1024  # the most that a request's head may have


class HeadTooLargeError(Exception):
    """A request's head has more than HEAD_BYTES."""


class HttpProtocol(HttpToolsProtocol):
    """A request that offers to go on in another protocol is served as if it did not, with its body: Java's client offers h2c
    by default. httptools takes what follows such a head for the other protocol, so the head is parsed again without the offer.

    A head of more than HEAD_BYTES is answered by 431, as soon as there is so much of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of the reads since the last that ended a head or a message or held some of a body: the parser may keep all of it. So
        # the ends of chunked bodies are bounded as well.
        self._kept_bytes = 0
        self._own_socket: int | None = None  # where this class may write to it
        self._served: Any = (
            None  # uvicorn's cycle of the request that is served; its `cycle` is that of the last to come
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        socket = transport.get_extra_info("socket")
        if socket is not None and self.scheme == "http" and hasattr(os, "writev"):
            self._own_socket = socket.fileno()

    def connection_lost(self, exc: Exception | None) -> None:
        """The request that is served learns of it, whatever came behind it: else it would be answered to nobody, an error."""
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._served = self.pipeline[-1][0]  # which is begun now
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._kept_bytes += len(data)
        rest = memoryview(data)
        try:
            while rest:
                rest = self._parse(rest)
            if self._kept_bytes > HEAD_BYTES:
                raise HeadTooLargeError
        except (HeadTooLargeError, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # An offer in spite of all is a CONNECT. What a callback raises is the context of the parser's own error.
            if HeadTooLargeError in (type(error), type(error.__context__)):
                self._refuse(431, "The head of the request is too large.")
            else:
                self._refuse(400, "Invalid HTTP request received.")

    def answer_whole(self, scope: Scope, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Answers 200 in one write and few steps, as uvicorn does in two and many. headers: checked ones, Content-Length too.
        False: nothing was done, since this is no plain case."""
        cycle = self.cycle
        if (
            cycle is None
            or cycle.scope is not scope  # another request came behind it
            or cycle.response_started
            or cycle.disconnected
            or not cycle.keep_alive
            or self.flow.write_paused
            or scope["method"] == "HEAD"
        ):
            return False
        lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        self._write_now(b"".join((STATUS_LINE[200], *lines, b"\r\n")), body)
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        cycle.on_response()
        return True

    def _write_now(self, head: bytes, body: bytes) -> None:
        """uvloop would send it when this turn of its own is over, and both would have to be joined."""
        transport = self.transport
        if self._own_socket is None or transport.is_closing() or transport.get_write_buffer_size():
            transport.write(head + body)
            return
        sent = _sent_now(self._own_socket, head, body)
        if sent < len(head) + len(body):
            transport.write((head + body)[sent:])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {WHOLE: self.answer_whole}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        if self._kept_bytes > HEAD_BYTES and self._head_bytes() > HEAD_BYTES:  # the read may hold a body too
            raise HeadTooLargeError
        if self.parser.should_upgrade():
            return
        self._kept_bytes = 0
        super().on_headers_complete()
        if self._served is None or self._served.response_complete:
            self._served = self.cycle

    def on_body(self, body: bytes) -> None:
        self._kept_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._kept_bytes = 0
        super().on_message_complete()

    def _parse(self, data: memoryview) -> memoryview:
        """Parses up to the end of an offer's head, or everything. Returns what is left."""
        try:
            self.parser.feed_data(data)
            return data[:0]
        except httptools.HttpParserUpgrade as offer:
            rest = data[offer.args[0] :]
        head = self._head_without_offer()
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # before httptools 0.6.3; as uvicorn's parsers since then
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(head)
        return rest

    def _head_without_offer(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _refuse(self, status: int, message: str) -> None:
        """Answers without the application, and closes."""
        self.logger.warning(message)
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(message)).encode()),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + message.encode())
        self.transport.close()


def _sent_now(socket: int, head: bytes, body: bytes) -> int:
    """How many bytes of both the socket took. Whatever is wrong with it the transport will find too, and knows what to do."""
    try:
        return os.writev(socket, (head, body))
    except OSError:
        return 0
