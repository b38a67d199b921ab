"""The client against a server that answers byte for byte what the test says."""

import socket
import threading
import time

import pytest

from polyrec.bench.connection import Connection

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


class Scripted:
    """Takes connections one after another; on each it waits for a request and sends the next answer, in its pieces."""

    def __init__(self, *connections):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1/recommend"
        self.requests = []
        self.thread = threading.Thread(target=self.run, args=(connections,), daemon=True)
        self.thread.start()

    def run(self, connections):
        for answers in connections:
            with self.listener.accept()[0] as client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for pieces in answers:
                    self.requests.append(client.recv(1 << 16))
                    for piece in pieces:
                        client.sendall(piece)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_answers_arrive_whole_however_they_are_cut(size):
    pieces = [OK[place : place + size] for place in range(0, len(OK), size)]
    server = Scripted([pieces, pieces])
    connection = Connection(server.url, "key", 10)
    assert connection.ask(b"{}") == connection.ask(b"{}") == (200, b"hello")
    assert server.requests[0] == server.requests[1]
    head, body = server.requests[0].split(b"\r\n\r\n")
    assert body == b"{}"
    assert head.split(b"\r\n") == [
        b"POST /v1/recommend HTTP/1.1",
        b"Host: " + server.url.split("/")[2].encode(),
        b"Content-Type: application/json",
        b"Authorization: Bearer key",
        b"Content-Length: 2",
    ]


def test_an_answer_ends_with_its_last_byte():
    """What the client does with it afterwards is not the server's."""
    server = Scripted([[OK[:-1], OK[-1:]]])
    connection, last = Connection(server.url, None, 10), []
    more = connection._more

    def slowly(end):
        some = more(end)
        last.append(connection.ended)
        time.sleep(0.02)
        return some

    connection._more = slowly
    began = time.perf_counter()
    assert connection.ask(b"{}") == (200, b"hello")
    assert began < connection.ended == last[-1] < time.perf_counter() - 0.02


def test_a_closed_connection_is_opened_anew():
    closing = b"HTTP/1.1 503 X\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    server = Scripted([[closing]], [[OK[:30]]], [[OK]])
    connection = Connection(server.url, None, 10)
    assert connection.ask(b"{}") == (503, b"")
    status, reason = connection.ask(b"{}")
    assert status is None
    assert b"closed the connection" in reason
    assert connection.ask(b"{}") == (200, b"hello")
    connection.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"SSH-2.0\r\n\r\n"])
def test_what_it_cannot_read_is_told(answer):
    connection = Connection(Scripted([[answer]]).url, None, 10)
    status, reason = connection.ask(b"{}")
    assert status is None
    assert b"no HTTP/1 answer with a Content-Length" in reason
