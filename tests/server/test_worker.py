"""An HTTP worker by itself: what is promised with the whole server is in test_pool."""

from __future__ import annotations

import gc
import os
import socket
import threading
from pathlib import Path

import pytest
from fake_engine import FakeFacts, load_parts
from processes import eventually

from polyrec.server.channel import Ask, Drain, Facts, Status, packed, take_messages
from polyrec.server.launch import listen
from polyrec.server.rehearsal import Rehearsal
from polyrec.server.settings import ServerSettings
from polyrec.server.worker import Worker, WorkerStart


@pytest.mark.parametrize("stays_awake", [False, True])
def test_a_worker_told_to_end_at_once_counts_what_it_gives_up(
    stays_awake: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are cancelled when its server has ended already. What it rehearses meanwhile counts for nothing."""
    monkeypatch.setattr("polyrec.server.metrics._NOTE_S", 60.0)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # the tests' own objects shall not stay
    own, its = socket.socketpair()
    own.settimeout(60)
    with own, listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        settings = ServerSettings(port=0)
        start = WorkerStart(tmp_path, settings, 0, os.getpid(), load_parts, stays_awake)
        worker = Worker(its, start)
        worker._engine._took = 1.0  # so the next answer is not expected soon
        thread = threading.Thread(target=worker.run, args=([listener],))
        thread.start()
        own.sendall(packed(Facts(FakeFacts("a device"))) + packed(Status("ready", True, 0, {})))
        body = b'{"history": ["i1"]}'
        head = f"POST /v1/recommend HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        received: list[Ask] = []
        content = bytearray()
        while not any(isinstance(message, Ask) for message in received):
            content += own.recv(1 << 16)
            take_messages(content, received.append)
        if stays_awake:
            rehearsal = worker._engine.rehearse
            assert isinstance(rehearsal, Rehearsal)
            eventually(lambda: rehearsal.written > 0, "a rehearsed answer")
        own.sendall(packed(Drain(now=True)))
        thread.join(60)
        assert not thread.is_alive()
    assert worker._metrics.in_flight._value.get() == 0
    assert not next(iter(worker._metrics.answers.collect())).samples
