"""The process: loading stages, key, queue, clients that leave, deadlines, and how it ends."""

from __future__ import annotations

import functools
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from processes import WORKERS, ServerProcess, eventually, fake_command, fake_server, metric

from polyrec.core.errors import CheckpointError, ConfigError
from polyrec.server.launch import listen, run_server
from polyrec.server.settings import ServerSettings

HOLD = {"history": ["hold", "first"]}


Fake = Callable[..., AbstractContextManager[ServerProcess]]


@pytest.fixture(params=WORKERS, ids=["here", "workers"])
def fake(request: pytest.FixtureRequest) -> Fake:
    """`fake_server`, with and without HTTP workers."""
    return functools.partial(fake_server, http_workers=request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def ask(url: str, history: list[str], **headers: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/recommend", json={"history": history}, headers=headers, timeout=60)


def test_port_is_open_while_loading(fake: Fake, folder: Path) -> None:
    (folder / "slow").touch()
    with fake(folder, wait_ready=False) as server, httpx.Client(base_url=server.url) as client:
        assert server.first_line == {"url": server.url, "stage": "loading"}
        eventually(lambda: client.get("/ready").json() == {"stage": "loading_model"}, "the stage is told")
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        refused = client.post("/v1/recommend", json={"history": ["i1"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert int(refused.headers["Retry-After"]) >= 1
        assert metric(client, "polyrec_ready") == 0
        (folder / "slow").unlink()
        eventually(lambda: client.get("/ready").status_code == 200, "ready")
        assert ask(server.url, ["i1"]).status_code == 200


def test_sigterm_while_loading(fake: Fake, folder: Path) -> None:
    (folder / "slow").touch()
    with fake(folder, wait_ready=False) as server:
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200, "up")
        server.terminate()
        (folder / "slow").unlink()
        assert server.process.wait(30) == 0


def test_a_starter_that_reads_one_line_and_leaves(fake: Fake, folder: Path) -> None:
    (folder / "slow").touch()
    with fake(folder, wait_ready=False) as server:
        server.process.stdout.close()  # type: ignore[union-attr]
        (folder / "slow").unlink()
        eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "ready all the same")
        server.terminate()
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_cleanly(fake: Fake, folder: Path, number: signal.Signals) -> None:
    with fake(folder) as server:
        server.process.send_signal(number)
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("http_workers", WORKERS)
def test_failed_loading_ends_the_process_with_its_error(folder: Path, http_workers: int) -> None:
    (folder / "broken").touch()
    command = fake_command(folder, http_workers=http_workers)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "model_broken: The model is broken. Mend it." in ended.stderr


def test_key(fake: Fake, folder: Path) -> None:
    with fake(folder, api_key="s3cret", host="0.0.0.0") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        missing = ask(url, ["i1"])
        assert (missing.status_code, missing.json()["error"]["code"]) == (401, "api_key_missing")
        assert missing.headers["WWW-Authenticate"] == "Bearer"
        wrong = ask(url, ["i1"], Authorization="Bearer s3cre")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "api_key_wrong")
        assert httpx.get(f"{url}/metrics").status_code == 401
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/ready").status_code == 200
        assert ask(url, ["i1"], Authorization="Bearer s3cret").status_code == 200
        assert ask(url, ["i1"], **{"X-API-Key": "s3cret"}).status_code == 200
        # Raw bytes that are not ASCII must be refused like any other wrong key.
        header = {"X-API-Key": "s3cr\u00e9t".encode()}
        assert httpx.get(f"{url}/v1/models", headers=header).status_code == 401  # type: ignore[arg-type]
        assert "s3cret" not in server.errors()


def test_full_queue_and_a_client_that_leaves(fake: Fake, folder: Path) -> None:
    """One request is held in the engine, two wait, the next gets 429; one of the waiting leaves and is cancelled."""
    with fake(folder, max_queue=2) as server, httpx.Client(base_url=server.url) as client:
        with ThreadPoolExecutor(2) as pool:
            held = pool.submit(ask, server.url, ["hold", "first"])
            eventually(lambda: metric(client, "polyrec_http_requests_in_flight") == 2, "held (and /metrics itself)")
            eventually(lambda: metric(client, "polyrec_queue_depth") == 0, "the engine took it")
            with pytest.raises(httpx.ReadTimeout):  # waits, then leaves
                httpx.post(f"{server.url}/v1/recommend", json={"history": ["i1", "leaver"]}, timeout=0.5)
            stays = pool.submit(ask, server.url, ["i2"])
            eventually(lambda: metric(client, "polyrec_queue_depth") == 2, "two wait")
            full = ask(server.url, ["i3"])
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert 1 <= int(full.headers["Retry-After"]) <= 60
            eventually(lambda: metric(client, 'polyrec_errors_total{code="client_left"}') == 1, "it left")
            assert ask(server.url, ["release"]).status_code == 200
            assert held.result().status_code == 200
            assert stays.result().status_code == 200
        assert ask(server.url, ["cancelled"]).json()["unknown_items"] == ["leaver"]
        assert metric(client, 'polyrec_http_requests_total{endpoint="/v1/recommend",status="499"}') == 1
        assert metric(client, "polyrec_engine_cancelled_total") == 1
        assert server.stop() == 0


def test_deadline(fake: Fake, folder: Path) -> None:
    with fake(folder, timeout=0.5) as server:
        late = ask(server.url, ["hold", "late"])
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(
                b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 99\r\n\r\n{"
            )
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")
        ask(server.url, ["release"])
        assert ask(server.url, ["i1"]).status_code == 200


def test_the_engine_is_told_the_deadline(fake: Fake, folder: Path) -> None:
    with fake(folder, timeout=25) as server:
        (left,) = ask(server.url, ["deadline"]).json()["unknown_items"]
        assert 5 < float(left) < 25


def test_a_request_may_have_less_time_but_not_more(fake: Fake, folder: Path) -> None:
    with fake(folder, timeout=25) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def post(path: str = "/v1/recommend", **body: object) -> httpx.Response:
            return client.post(path, json=body)

        late = post(history=["hold", "late"], timeout_ms=200)
        error = late.json()["error"]
        assert (late.status_code, error["code"]) == (504, "deadline_exceeded")
        assert "0.2 s" in error["message"]
        assert "timeout_ms" in error["remedy"]
        user = {"role": "user", "content": "<s_a_1>"}  # it waits behind the one that the engine is held with
        late = post("/v1/chat/completions", messages=[user], timeout_ms=200)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        post(history=["release"])
        assert post(history=["i1"], timeout_ms=20_000).status_code == 200
        for timeout_ms, least, most in ((20_000, 1, 20), (10**6, 20, 25), (10**400, 20, 25), (None, 20, 25)):
            (left,) = post(history=["deadline"], timeout_ms=timeout_ms).json()["unknown_items"]
            assert least < float(left) < most


def test_sigterm_lets_requests_finish(fake: Fake, folder: Path) -> None:
    with fake(folder) as server, httpx.Client(base_url=server.url) as client:
        with ThreadPoolExecutor(2) as pool:
            held = pool.submit(ask, server.url, ["hold", "first"])
            eventually(lambda: metric(client, "polyrec_http_requests_in_flight") == 2, "held")
            eventually(lambda: metric(client, "polyrec_queue_depth") == 0, "the engine took it")
            waiting = pool.submit(ask, server.url, ["i1"])
            eventually(lambda: metric(client, "polyrec_queue_depth") == 1, "one more waits")
            releaser = start_body(server.url)  # a request under way, which will free the engine
            server.terminate()
            eventually(lambda: not accepts(server.url), "no new connections")
            assert not held.done()
            releaser.sendall(b'{"history": ["release"]}')
            assert releaser.recv(100).startswith(b"HTTP/1.1 200")
            releaser.close()
            assert held.result().status_code == 200
            assert waiting.result().status_code == 200
        assert server.process.wait(30) == 0
        assert server.logs()[-1]["message"] == "stopped"


def start_body(url: str) -> socket.socket:
    """A connection whose request's headers are sent, and taken by the server, but not its body."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(
        b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nContent-Length: 24\r\n\r\n"
    )
    assert connection.recv(100).startswith(b"HTTP/1.1 100")
    return connection


def accepts(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=5)
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        return True
    return True


def test_an_engine_that_died_is_told(fake: Fake, folder: Path) -> None:
    with fake(folder, timeout=1) as server, httpx.Client(base_url=server.url) as client:
        assert ask(server.url, ["die"]).status_code == 504
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "engine_stopped")
        ready = client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"stage": "engine_stopped"})
        refused = ask(server.url, ["i1"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stopped")


def test_32_clients_at_once(fake: Fake, folder: Path) -> None:
    start = threading.Barrier(32)

    def client_work(number: int) -> list[set[str]]:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            start.wait()
            answers = [client.post("/v1/recommend", json={"history": ["i5"], "n": number + 1}) for _ in range(5)]
        return [{item["item_id"] for item in answer.json()["items"]} for answer in answers]

    with fake(folder) as server, ThreadPoolExecutor(32) as pool:
        for number, answers in enumerate(pool.map(client_work, range(32))):
            assert [len(items) for items in answers] == [number + 1] * 5


def test_chat_template_of_the_folder(fake: Fake, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}"
        "{% if message.role == 'assistant' %}{{ raise_exception('users only') }}{% endif %}"
        "<s_a_0>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|sid_begin|>{% endif %}"
    )
    with fake(folder) as server, httpx.Client(base_url=server.url) as client:
        user = {"role": "user", "content": [{"type": "text", "text": "<s_a_1>"}, {"type": "text", "text": "<s_b_1>"}]}
        answer = client.post("/v1/chat/completions", json={"messages": [user, user]})
        assert answer.json()["usage"]["prompt_tokens"] == 7  # 2 x (one of the template, two), begin not doubled
        refused = client.post("/v1/chat/completions", json={"messages": [user, {"role": "assistant", "content": "x"}]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "chat_template_refused")
        assert "users only" in refused.json()["error"]["message"]


def test_answers_are_not_held_back_by_nagle() -> None:
    """asyncio asks a socket for this protocol before it sets TCP_NODELAY; a listener without it costs 40 ms an answer."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_addresses_that_cannot_be_used(folder: Path) -> None:
    with pytest.raises(ConfigError) as open_host:
        ServerSettings(host="0.0.0.0")
    assert open_host.value.code == "api_key_required"
    with pytest.raises(ConfigError) as empty_key:
        ServerSettings(api_key="")
    assert empty_key.value.code == "api_key_invalid"
    with pytest.raises(CheckpointError) as absent:
        run_server(folder / "absent", ServerSettings(port=0))
    assert absent.value.code == "model_folder_missing"
    with pytest.raises(CheckpointError) as empty:
        run_server(folder, ServerSettings(port=0))
    assert empty.value.code == "model_folder_incomplete"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as used:
        run_server(folder, ServerSettings(port=taken.getsockname()[1]), load=lambda *_: pytest.fail("was loaded"))
    assert used.value.code == "address_unusable"
