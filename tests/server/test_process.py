"""`polyrec serve` as a user starts it, around the real engine and a small model of random weights."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from processes import ServerProcess, eventually, metric, metric_in

from polyrec.engine.recommender import Recommender
from polyrec.testing.tiny import write_tiny_model

NUM_ITEMS = 1500


def serve(folder: Path, *flags: str, **environment: str) -> ServerProcess:
    command = [sys.executable, "-m", "polyrec.cli.main", "serve", str(folder), "--port", "0", *flags]
    return ServerProcess(command, OMP_NUM_THREADS="1", **environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("process") / "tiny", num_items=NUM_ITEMS, seed=3)


@pytest.fixture(scope="module")
def recommender(folder: Path) -> Recommender:
    return Recommender.from_pretrained(folder)


@pytest.fixture(scope="module")
def tiny_server(folder: Path) -> Iterator[ServerProcess]:
    running = serve(folder, "--num-threads", "1")
    yield running
    assert running.stop() == 0


@pytest.fixture
def tiny_client(tiny_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as open_client:
        yield open_client


def test_the_answer_is_the_recommender_s(tiny_client: httpx.Client, recommender: Recommender) -> None:
    sid = recommender.layout.text(recommender.catalog.codes[9])
    history = ["item-4", ["item-7", "item-8"], sid, "nowhere"]
    allow = [f"item-{row}" for row in range(0, NUM_ITEMS, 2)]
    options = {"n": 20, "beam_width": 50, "exclude": ["item-10"], "allow": allow, "exclude_seen": True}
    answer = tiny_client.post("/v1/recommend", json={"history": history, **options}).json()
    expected = recommender.recommend(history, **options)  # type: ignore[arg-type]
    assert [item["item_id"] for item in answer["items"]] == expected.item_ids
    assert [item["sid"] for item in answer["items"]] == [item.sid for item in expected.items]
    np.testing.assert_allclose(
        [item["score"] for item in answer["items"]], [item.score for item in expected.items], atol=1e-4
    )
    assert answer["items"][0]["name"] == expected.items[0].name
    assert [item["rank"] for item in answer["items"]] == list(range(1, 21))
    assert answer["unknown_items"] == ["nowhere"]
    assert (answer["source"], answer["score_rule"]) == ("model", "level")
    assert not {"item-4", "item-7", "item-8", "item-9", "item-10"} & {item["item_id"] for item in answer["items"]}


def test_cold_users(tiny_client: httpx.Client, recommender: Recommender) -> None:
    answer = tiny_client.post("/v1/recommend", json={"history": ["nowhere"], "n": 5}).json()
    counts = recommender.catalog.counts
    assert answer["source"] == "popularity"
    assert [item["score"] for item in answer["items"]] == sorted(counts.tolist(), reverse=True)[:5]
    refused = tiny_client.post("/v1/recommend", json={"history": ["nowhere"], "cold": "error"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "cold_history")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"history": ["item-1", "nowhere"], "unknown": "error"}, "unknown_items"),
        ({"allow": ["nowhere"]}, "unknown_items"),
        ({"exclude": ["nowhere"], "unknown": "error"}, "unknown_items"),
        ({"n": 5000}, "n_out_of_range"),
        ({"n": 0}, "n_out_of_range"),
        ({"n": 9, "beam_width": 8}, "beam_width_out_of_range"),
    ],
)
def test_the_engine_s_refusals(tiny_client: httpx.Client, change: dict[str, object], code: str) -> None:
    refused = tiny_client.post("/v1/recommend", json={"history": ["item-1"], **change})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)


def test_fewer_items_than_asked_when_no_more_may_come(tiny_client: httpx.Client) -> None:
    body = {"history": ["item-1"], "n": 10, "allow": ["item-1", "item-2", "item-3"], "exclude": ["item-3"]}
    items = tiny_client.post("/v1/recommend", json=body).json()["items"]
    assert {item["item_id"] for item in items} == {"item-1", "item-2"}
    nothing = tiny_client.post("/v1/recommend", json={**body, "exclude": ["item-1", "item-2", "item-3"]})
    assert (nothing.status_code, nothing.json()["items"]) == (200, [])


def test_1024_items(tiny_client: httpx.Client, recommender: Recommender) -> None:
    answer = tiny_client.post("/v1/recommend", json={"history": ["item-1"], "n": 1024}).json()
    ids = [item["item_id"] for item in answer["items"]]
    scores = [item["score"] for item in answer["items"]]
    assert len(set(ids)) == 1024
    assert all(recommender.catalog.row(item) is not None for item in ids)
    assert scores == sorted(scores, reverse=True)


def test_a_very_long_history_is_cut(tiny_client: httpx.Client) -> None:
    answer = tiny_client.post("/v1/recommend", json={"history": [f"item-{row % NUM_ITEMS}" for row in range(9000)]})
    assert len(answer.json()["items"]) == 10


def test_chat_says_what_recommend_says(tiny_client: httpx.Client, recommender: Recommender) -> None:
    rows = np.array([3, 5, 6])
    prompt = recommender.tokenizer.decode(recommender.prompt_of(rows, np.array([0, 1, 1])).tolist())
    body = {"messages": [{"role": "user", "content": prompt.removesuffix("<|sid_begin|>")}], "n": 16}
    answer = tiny_client.post("/v1/chat/completions", json=body).json()
    expected = recommender.recommend(["item-3", ["item-5", "item-6"]], n=16)
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert contents == [f"<|sid_begin|>{item.sid}<|sid_end|>" for item in expected.items]
    np.testing.assert_allclose(
        [choice["sglext"]["sequence_score"] for choice in answer["choices"]],
        [item.score for item in expected.items],
        atol=1e-4,
    )
    assert answer["usage"]["prompt_tokens"] == len(recommender.prompt_of(rows, np.array([0, 1, 1])))


def test_chat_refuses_too_long_a_prompt(tiny_client: httpx.Client, recommender: Recommender) -> None:
    content = "<s_a_1>" * recommender.max_prompt_tokens
    refused = tiny_client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "prompt_too_long")


def test_32_clients_get_their_own_answers(tiny_server: ServerProcess, recommender: Recommender) -> None:
    """Whatever shares its batch, an answer is the one its history gets alone."""
    start = threading.Barrier(32)

    def work(number: int) -> list[dict[str, object]]:
        with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
            start.wait()
            body = {"history": [f"item-{number}", f"item-{2 * number + 1}"], "n": 5 + number}
            return client.post("/v1/recommend", json=body).json()["items"]

    with ThreadPoolExecutor(32) as pool:
        for number, items in enumerate(pool.map(work, range(32))):
            ids = [item["item_id"] for item in items]
            assert len(set(ids)) == 5 + number
            alone = recommender.recommend([f"item-{number}", f"item-{2 * number + 1}"], n=5 + number)
            assert ids == alone.item_ids


def test_metrics_of_the_engine(tiny_client: httpx.Client) -> None:
    tiny_client.post("/v1/recommend", json={"history": ["item-1"]})
    for name in ("requests_total", "batches_total", "prompt_tokens_total", "busy_seconds_total"):
        assert metric(tiny_client, f"polyrec_engine_{name}") > 0, name


def test_a_user_who_returns_costs_the_new_items(tiny_server: ServerProcess, tiny_client: httpx.Client) -> None:
    def hits() -> float:
        return metric(tiny_client, "polyrec_engine_hit_tokens_total")

    history = [f"item-{900 + row}" for row in range(20)]
    tiny_client.post("/v1/recommend", json={"history": history})
    eventually(lambda: metric(tiny_client, "polyrec_engine_used_pages") == 0, "nothing runs")
    before = hits()
    answer = tiny_client.post("/v1/recommend", json={"history": [*history, "item-7"]})
    assert answer.status_code == 200
    eventually(lambda: hits() - before >= 48, "20 items, which are 60 tokens and more, were cached")
    [line] = [line for line in tiny_server.logs() if line["message"].startswith("keys and values: ")]
    assert "bytes a token (float32)" in line["message"]
    assert (line["prefix_cache"], line["graph_bytes"]) == ("on", 0)
    [ready] = [line for line in tiny_server.logs() if line["message"] == "the engine is ready"]
    stages = [ready[f"{stage}_seconds"] for stage in ("loading_model", "recording_graphs", "warming_up")]
    assert min(stages) >= 0
    assert sum(stages) > 0
    num_pages = int(re.search(r"([\d,]+) pages", line["message"])[1].replace(",", ""))  # type: ignore[index]
    states = [metric(tiny_client, f"polyrec_engine_{state}_pages") for state in ("free", "kept", "used")]
    assert sum(states) == num_pages - 1


def test_the_cache_as_told(folder: Path) -> None:
    flags = ["--no-prefix-cache", "--kv-cache-dtype", "bf16", "--max-length", "128"]
    server = serve(folder, "--num-threads", "1", *flags)
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            body = {"history": [f"item-{row}" for row in range(30)]}
            assert [client.post("/v1/recommend", json=body).status_code for _ in range(2)] == [200, 200]
            assert metric(client, "polyrec_engine_prompt_tokens_total") > 0
            assert metric(client, "polyrec_engine_hit_tokens_total") == 0
            message = {"role": "user", "content": "<s_a_1>" * 128}
            long = client.post("/v1/chat/completions", json={"messages": [message]})
            assert (long.status_code, long.json()["error"]["code"]) == (400, "prompt_too_long")
        [line] = [line for line in server.logs() if line["message"].startswith("keys and values: ")]
        assert "(bfloat16)" in line["message"]
        assert line["prefix_cache"] == "off"
    finally:
        assert server.stop() == 0


def test_a_full_queue_and_leavers_under_load(folder: Path) -> None:
    """64 heavy requests against a queue of one: each is answered or told to come back, then all is well again."""
    server = serve(folder, "--max-queue", "1", "--max-batch", "1", "--num-threads", "1")
    try:
        body = {"history": [f"item-{row}" for row in range(40)], "n": 1024}

        def work(number: int) -> int:
            try:
                patience = 0.05 if number % 8 == 7 else 60
                return httpx.post(f"{server.url}/v1/recommend", json=body, timeout=patience).status_code
            except httpx.TimeoutException:
                return 0

        with ThreadPoolExecutor(64) as pool:
            outcomes = list(pool.map(work, range(64)))
        assert {200, 429} <= set(outcomes) <= {0, 200, 429}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            eventually(lambda: metric(client, "polyrec_queue_depth") == 0, "the queue empties")
            assert client.post("/v1/recommend", json=body).status_code == 200
        assert not [line for line in server.logs() if line.get("status") == 500]
    finally:
        assert server.stop() == 0


def test_leavers_do_not_cost_a_search(tiny_server: ServerProcess, tiny_client: httpx.Client) -> None:
    body = json.dumps({"history": [f"item-{row}" for row in range(40)], "n": 1024}).encode()
    host, port = tiny_server.url.removeprefix("http://").split(":")
    head = f"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def leave() -> bool:
        """64 requests for one batch of 32 at a time; all leave at once, so that some are still waiting."""
        connections = [socket.create_connection((host, int(port)), timeout=30) for _ in range(64)]
        for connection in connections:
            connection.sendall(head + body)
        for connection in connections:
            connection.close()
        return metric(tiny_client, "polyrec_engine_cancelled_total") > 0

    eventually(leave, "the engine left out a cancelled request")
    assert metric(tiny_client, 'polyrec_errors_total{code="client_left"}') > 0
    eventually(lambda: metric(tiny_client, "polyrec_queue_depth") == 0, "the queue empties")
    answer = tiny_client.post("/v1/recommend", content=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["items"]) == 1024


def test_sigterm_answers_what_is_here(folder: Path) -> None:
    server = serve(folder, "--max-batch", "1", "--num-threads", "1", "--api-key", "k")
    body = {"history": ["item-1"], "n": 1024}

    def work(_: int) -> int:
        return httpx.post(f"{server.url}/v1/recommend", json=body, headers={"X-API-Key": "k"}, timeout=60).status_code

    try:
        with ThreadPoolExecutor(16) as pool, httpx.Client(base_url=server.url, headers={"X-API-Key": "k"}) as client:
            answers = [pool.submit(work, number) for number in range(16)]
            # 16, and the request for /metrics itself: all have arrived.
            counted = 'polyrec_http_requests_total{endpoint="/v1/recommend",status="200"}'

            def num_arrived() -> float:
                text = client.get(
                    "/metrics"
                ).text  # once: between two looks a request would go from one count to the other
                return metric_in(text, "polyrec_http_requests_in_flight") - 1 + metric_in(text, counted)

            eventually(lambda: num_arrived() >= 16, "all arrived")
            server.terminate()
            assert [answer.result() for answer in answers] == [200] * 16
        assert server.process.wait(60) == 0
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--host", "0.0.0.0"], "api_key_required"),
        (["--max-beam-width", "0"], "config_invalid"),
        (["--timeout", "0"], "config_invalid"),
        (["--memory-fraction", "1.5"], "config_invalid"),
    ],
)
def test_wrong_flags_end_with_a_code(folder: Path, flags: list[str], code: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)ended with 2: .*{code}") as failure:
        serve(folder, *flags)
    assert "Traceback" not in str(failure.value)


def test_a_folder_without_weights_ends_with_a_code(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "catalog.parquet", "polyrec.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    command = [sys.executable, "-m", "polyrec.cli.main", "serve", str(tmp_path), "--port", "0"]
    server = ServerProcess(command, wait_ready=False)
    try:
        assert server.process.wait(60) == 2
        assert "Traceback" not in server.errors()
        assert "What to do" in server.errors()
    finally:
        server.stop()
