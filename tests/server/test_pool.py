"""HTTP workers: what is promised only of them. What holds with and without them is in test_launch and test_app."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ServerProcess, eventually, fake_server, metric
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polyrec.core.errors import RequestError
from polyrec.engine.recommender import Recommender
from polyrec.engine.searches import SearchRequest, SearchResult
from polyrec.server.channel import Answers, Ask, Cancel, Channel, Status, packed, take_messages
from polyrec.server.http import run_loop
from polyrec.server.metrics import added_up
from polyrec.server.pool import Peer, WorkerPool
from polyrec.server.state import ServerState
from polyrec.testing.tiny import write_tiny_model

linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads processes from /proc")
ANSWERED = 'polyrec_http_requests_total{endpoint="/v1/recommend",status="200"}'


def workers_of(pid: int) -> list[int]:
    """Process ids of the workers."""
    lists = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    children = [int(child) for found in lists for child in found]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def answer(url: str) -> int:
    return httpx.post(f"{url}/v1/recommend", json={"history": ["i1"]}, timeout=60).status_code


def test_a_worker_that_cannot_load_ends_the_server_with_its_error(folder: Path) -> None:
    (folder / "no_parts").touch()
    with fake_server(folder, wait_ready=False, http_workers=2) as server:
        assert server.process.wait(60) == 1
        assert "parts_broken: The catalog is broken. Mend it." in server.errors()


def test_a_worker_with_a_bug_as_it_loads_ends_the_server(folder: Path) -> None:
    (folder / "parts_bug").touch()
    with fake_server(folder, wait_ready=False, http_workers=2) as server:
        assert server.process.wait(60) == 1
        assert "RuntimeError: a bug in the parts" in server.errors()
        assert "An HTTP worker ended as it started" in server.errors()


@linux
@pytest.mark.parametrize("with_lines", [True, False])
def test_a_worker_that_ends_is_replaced_and_what_it_counted_stays(folder: Path, with_lines: bool) -> None:
    if not with_lines:
        (folder / "no_lines").touch()
    with fake_server(folder, http_workers=2) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert [answer(server.url) for _ in range(20)] == [200] * 20
        assert metric(client, ANSWERED) == 20
        before = workers_of(server.process.pid)
        assert len(before) == 2
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        # Connections wait until there is a worker again; none is refused.
        assert answer(server.url) == 200
        eventually(lambda: len(workers_of(server.process.pid)) == 2, "both are replaced")
        assert not set(before) & set(workers_of(server.process.pid))
        with httpx.Client(base_url=server.url, timeout=60) as other:
            assert metric(other, ANSWERED) >= 1
        assert "an HTTP worker ended and is replaced" in server.errors()
        assert server.stop() == 0


@linux
def test_a_replacement_that_ends_as_it_loads_is_replaced_too(folder: Path) -> None:
    with fake_server(folder, http_workers=2) as server:
        first, second = workers_of(server.process.pid)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: set(workers_of(server.process.pid)) - {first, second}, "the replacement is there")
        for pid in set(workers_of(server.process.pid)) - {first, second}:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: server.errors().count("an HTTP worker ended and is replaced") == 2, "both ends are told")
        assert answer(server.url) == 200, "the other one answers meanwhile"
        eventually(lambda: len(workers_of(server.process.pid)) == 2, "there are two again")
        assert server.stop() == 0


@linux
def test_workers_end_with_the_engine_s_process(folder: Path) -> None:
    with fake_server(folder, http_workers=2) as server:
        workers = workers_of(server.process.pid)
        server.process.send_signal(signal.SIGKILL)
        eventually(lambda: all(map(is_gone, workers)), "both ended")


def blocks_signals(pid: int) -> bool:
    """Whether SIGINT and SIGTERM wait."""
    status = Path(f"/proc/{pid}/status").read_text()
    blocked = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk"))
    return all(blocked >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM))


@linux
def test_signals_to_workers_change_nothing(folder: Path) -> None:
    """A terminal's Ctrl-C reaches all processes; the engine's decides."""
    with fake_server(folder, http_workers=2) as server:
        workers = workers_of(server.process.pid)
        assert len(workers) == 2
        for pid in workers:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        assert [answer(server.url) for _ in range(10)] == [200] * 10
        assert workers_of(server.process.pid) == workers, "none ended, nor was replaced"
        assert all(map(blocks_signals, workers))
        server.terminate()
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.errors()


def test_counts_of_all_workers_are_added_up(folder: Path) -> None:
    with fake_server(folder, http_workers=3) as server:
        assert [answer(server.url) for _ in range(30)] == [200] * 30
        for _ in range(5):  # whichever is asked
            with httpx.Client(base_url=server.url, timeout=60) as client:
                eventually(lambda client=client: metric(client, ANSWERED) == 30, "all are counted")
                assert metric(client, "polyrec_engine_requests_total") == 30


def test_adding_up() -> None:
    def counted(number: int) -> list:
        registry = CollectorRegistry()
        counter = Counter("c", "help", ["label"], registry=registry)
        counter.labels("all").inc(number)
        counter.labels(f"only {number}").inc()
        Gauge("g", "help", registry=registry).set(number)
        Histogram("h", "help", buckets=(1, 2), registry=registry).observe(number)
        return list(registry.collect())

    parts = [counted(1), counted(2)]
    (created, _) = (sample.value for sample in [*parts[0][0].samples, *parts[1][0].samples] if sample.name == "c_created"
                    and sample.labels["label"] == "all")  # fmt: skip
    samples = {
        (sample.name, *sample.labels.values()): sample.value for family in added_up(parts) for sample in family.samples
    }
    assert samples["c_total", "all"] == 3
    assert samples["c_total", "only 1"] == samples["c_total", "only 2"] == 1
    assert samples["c_created", "all"] == created
    assert samples["g",] == 3
    assert (samples["h_bucket", "1.0"], samples["h_bucket", "2.0"], samples["h_count",], samples["h_sum",]) == (
        1,
        2,
        2,
        3,
    )


def test_only_answers_that_refuse_tell_how_things_stand() -> None:
    """The number of searches that wait, for `Retry-After`; it would double what every other answer takes to send."""
    sent: list[Answers] = []

    async def run() -> None:
        pool = WorkerPool(1, None, None, ServerState("model"), print)  # type: ignore[arg-type]
        pool._loop = asyncio.get_running_loop()
        refused, answered = Peer(), Peer()
        for peer in (refused, answered):
            peer.channel = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
        for number, (peer, error) in enumerate([(answered, None), (refused, RuntimeError("full")), (refused, None)]):
            future: Future[str] = Future()
            future.add_done_callback(functools.partial(pool._done, peer, number))
            if error is None:
                future.set_result("found")
            else:
                future.set_exception(error)
        await asyncio.sleep(0.01)

    run_loop(run())
    assert [[number for number, _ in answers.results] for answers in sent] == [[0], [1, 2]]
    assert sent[0].status is None
    assert isinstance(sent[1].status, Status)


@pytest.mark.parametrize("num", [1, 4, 5])
def test_few_answers_are_sent_by_the_engine_s_thread(num: int) -> None:
    """Many by the event loop's: the next batch waits for the engine's. Together, all of them, and once."""
    sent: list[tuple[int, list[int]]] = []

    async def run() -> None:
        pool = WorkerPool(1, None, None, ServerState("model"), print)  # type: ignore[arg-type]
        pool._loop = asyncio.get_running_loop()
        peer = Peer()
        peer.channel = SimpleNamespace(  # type: ignore[assignment]
            send=lambda answers: sent.append((threading.get_ident(), [number for number, _ in answers.results]))
        )
        futures: list[Future[str]] = [Future() for _ in range(num)]
        for number, future in enumerate(futures):
            peer.asked[number] = future
            future.add_done_callback(functools.partial(pool._found, peer, number))

        def engine() -> None:
            pool._engine_thread = threading.get_ident()
            for future in futures:
                future.set_result("found")
            assert not sent
            pool.answered()

        thread = threading.Thread(target=engine)
        thread.start()
        while not sent or thread.is_alive():
            await asyncio.sleep(0.001)
        assert [number for _, number in sent] == [[*range(num)]]
        assert (sent[0][0] == thread.ident) == (num <= 4)
        assert not peer.asked

    run_loop(run())


def test_without_uvloop_it_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def kind() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run_loop(kind()) == "uvloop"
    assert not caplog.records
    monkeypatch.setitem(sys.modules, "uvloop", None)  # its import fails
    monkeypatch.setattr(logging.getLogger("polyrec"), "propagate", True)
    assert run_loop(kind()).startswith("asyncio")
    assert [record.message for record in caplog.records] == ["uvloop is not installed: asyncio's slower loop runs"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5_000), max_size=6), st.integers(1, 20_000))
def test_messages_arrive_whole_and_in_order(sizes: list[int], piece: int) -> None:
    """However the stream is cut."""
    sent: list[bytes] = []
    writer, received = Channel(print, print), []

    class Transport:  # as uvloop's, no subclass of asyncio's
        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            sent.append(data)

    writer.connection_made(Transport())  # type: ignore[arg-type]
    messages = [Ask(number, bytes(size), None) if size % 2 else Cancel(size) for number, size in enumerate(sizes)]
    for message in messages:
        writer.send(message)
    stream = b"".join(sent)
    reader = Channel(received.append, print)
    reader.begin()
    for place in range(0, len(stream), piece):
        reader.data_received(stream[place : place + piece])
    assert received == messages


def test_messages_wait_for_who_opens_the_channel() -> None:
    """uvloop reads a socket before `open` returns, and a worker cannot answer before it has its channel."""
    own, its = socket.socketpair()
    content = pickle.dumps(Cancel(7))
    its.sendall(len(content).to_bytes(4, "little") + content)
    its.close()

    async def run() -> list[object]:
        told: list[object] = []
        channel: Channel | None = None
        channel = await Channel.open(
            own, lambda message: told.append((message, channel)), lambda: told.append(("closed", channel))
        )
        while len(told) < 2:
            await asyncio.sleep(0.01)
        return [what for what, opened in told if opened is channel]

    assert run_loop(run()) == [Cancel(7), "closed"]


@pytest.mark.parametrize("early", [True, False], ids=["before it begins", "after"])
@pytest.mark.parametrize("run_in_loop", [asyncio.run, run_loop])
def test_a_message_that_fails_ends_the_channel(run_in_loop, early: bool) -> None:
    """Whenever it comes; and it is taken once."""
    own, its = socket.socketpair()
    content = pickle.dumps(Cancel(7))

    async def run() -> tuple[list[object], int]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["exception"]))
        raised: list[object] = []
        taken: list[object] = []
        closed = asyncio.Event()

        def take(message: object) -> None:
            taken.append(message)
            raise RuntimeError("a bug")

        if early:
            its.sendall(len(content).to_bytes(4, "little") + content)
        channel = Channel(take, closed.set)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=own)
        await asyncio.sleep(0.05)  # it is read by now
        if early:
            asyncio.get_running_loop().call_soon(channel.begin)
        else:
            channel.begin()
            its.sendall(len(content).to_bytes(4, "little") + content)
        await asyncio.wait_for(closed.wait(), 20)
        channel.data_received(b"")
        return raised, len(taken)

    with its:
        raised, num_taken = run_in_loop(run())
    assert [str(error) for error in raised] == ["a bug"]
    assert num_taken == 1


@pytest.mark.parametrize("run_in_loop", [asyncio.run, run_loop])
def test_sending_does_not_wait_for_the_reader(run_in_loop) -> None:
    async def run() -> list[object]:
        own, its = socket.socketpair()
        received: list[object] = []
        done = asyncio.Event()
        sender = await Channel.open(own, print, done.set)
        for number in range(50):
            sender.send(Ask(number, bytes(100_000), None))  # far more than a socket holds, and nobody reads
        reader = await Channel.open(its, received.append, done.set)
        while len(received) < 50:
            await asyncio.sleep(0.01)
        reader.close()  # its end of the channel
        await asyncio.wait_for(done.wait(), 20)
        sender.send(Cancel(1))  # nobody is there: no error
        return received

    assert [message.number for message in run_in_loop(run())] == [*range(50)]


# The real engine.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("pool") / "tiny", num_items=300, seed=5)


@pytest.fixture(scope="module")
def tiny_server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "polyrec.cli.main", "serve", str(tiny), "--port", "0", "--http-workers", "2"]
    traces = tmp_path_factory.mktemp("traces")
    server = ServerProcess([*command, "--num-threads", "1", "--profile-dir", str(traces)], OMP_NUM_THREADS="1")
    yield server
    assert server.stop() == 0


def test_answers_are_the_recommender_s(tiny: Path, tiny_server: ServerProcess) -> None:
    recommender = Recommender.from_pretrained(tiny)
    for number in range(8):
        body = {"history": [f"item-{number}", ["item-9", "nothing"]], "n": 20 + number, "exclude": ["item-1"]}
        with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
            found = client.post("/v1/recommend", json=body).json()
        alone = recommender.recommend(body["history"], n=body["n"], exclude=body["exclude"])
        assert [(item["item_id"], item["sid"], item["name"]) for item in found["items"]] == [
            (item.item_id, item.sid, item.name) for item in alone.items
        ]
        assert [item["score"] for item in found["items"]] == pytest.approx(
            [item.score for item in alone.items], abs=1e-5
        )
        assert found["unknown_items"] == ["nothing"]


def test_cold_histories_and_refusals(tiny_server: ServerProcess) -> None:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        assert client.post("/v1/recommend", json={"history": ["nothing"]}).json()["source"] == "popularity"
        long = {"messages": [{"role": "user", "content": "<s_a_1>" * 50_000}]}
        assert client.post("/v1/chat/completions", json=long).json()["error"]["code"] == "prompt_too_long"


@linux
def test_workers_hold_no_torch(tiny_server: ServerProcess) -> None:
    workers = workers_of(tiny_server.process.pid)
    assert len(workers) == 2
    for pid in workers:
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert "torch" in Path(f"/proc/{tiny_server.process.pid}/maps").read_text()


def test_profiles_are_taken_of_the_engine(tiny_server: ServerProcess) -> None:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        assert client.post("/v1/profile/stop").json()["error"]["code"] == "profile_not_running"
        assert client.post("/v1/profile/start").json() == {"running": True, "file": None}
        assert client.post("/v1/recommend", json={"history": ["item-1"]}).status_code == 200
        assert Path(client.post("/v1/profile/stop").json()["file"]).is_file()


RESULT = SearchResult(np.array([3, 1]), np.array([-0.5, -1.0], np.float32))


@pytest.mark.parametrize(
    "message",
    [
        Ask(3, SearchRequest(np.arange(5), 2, 4), None),
        Ask(3, SearchRequest(np.arange(5), 2, 4, np.array([1]), np.array([2, 7])), 1.5),
        Ask(3, ("something", "else"), 1.5),
        Answers([(1, RESULT)], None),
        Answers([(1, RESULT), (2, SearchResult(np.zeros(0, int), np.zeros(0, np.float32)))], None),
        Answers([(1, RESULT), (2, RequestError("code", "message", "remedy"))], None),
        Answers([(1, RESULT)], Status("ready", True, 3, {})),
        Answers([(1, ["counted"])], None),
        Answers([], None),
        ("another", "tuple"),
        (),
    ],
    ids=str,
)
def test_searches_and_what_they_find_arrive_as_they_were_sent(message: object) -> None:
    received: list[Any] = []
    take_messages(bytearray(packed(message)), received.append)
    assert type(received[0]) is type(message)
    np.testing.assert_equal(told(received[0]), told(message))


def told(value: Any) -> Any:
    """What it holds, in a form that compares."""
    if isinstance(value, Exception):
        return type(value), value.__dict__
    if dataclasses.is_dataclass(value):
        return type(value).__name__, [told(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [told(one) for one in value] if isinstance(value, list | tuple) else value
