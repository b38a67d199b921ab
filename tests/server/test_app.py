"""The endpoints of a real server process, asked by a real HTTP client: answers, and every refusal."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import ServerProcess, eventually, metric

DOC = Path(__file__).parents[2] / "docs" / "server.md"
JSON = {"Content-Type": "application/json"}


def refused(answer: httpx.Response, status: int, code: str) -> dict[str, str]:
    """Checks the shape that every refusal has."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code, error
    assert set(error) == {"code", "message", "remedy", "request_id"}
    assert error["message"]
    assert error["remedy"]
    assert error["request_id"] == answer.headers["X-Request-ID"]
    return error


def test_recommend_answers(client: httpx.Client) -> None:
    body = {"history": ["i5", ["i6", "nowhere"]], "n": 3, "exclude": ["i1"]}
    answer = client.post("/v1/recommend", json=body, headers={"X-Request-ID": "abc-1"})
    assert answer.status_code == 200
    assert answer.headers["X-Request-ID"] == "abc-1"
    value = answer.json()
    assert value.pop("timing_ms") > 0
    assert value == {
        "request_id": "abc-1",
        "items": [
            {"rank": 1, "item_id": "i0", "score": 0.0, "sid": "<s_a_0><s_b_0><s_c_0>", "name": None},
            {"rank": 2, "item_id": "i2", "score": -1.0, "sid": "<s_a_0><s_b_0><s_c_2>", "name": "Item 2"},
            {"rank": 3, "item_id": "i3", "score": -2.0, "sid": "<s_a_0><s_b_0><s_c_3>", "name": "Item 3"},
        ],
        "score_rule": "level",
        "source": "model",
        "unknown_items": ["nowhere"],
    }


def test_recommend_allow_and_defaults(client: httpx.Client) -> None:
    assert len(client.post("/v1/recommend", json={"history": ["i5"]}).json()["items"]) == 10
    allowed = client.post("/v1/recommend", json={"history": ["i5"], "allow": ["i9", "i7"]}).json()["items"]
    assert [item["item_id"] for item in allowed] == ["i7", "i9"]


def test_recommend_1024(client: httpx.Client) -> None:
    answer = client.post("/v1/recommend", json={"history": ["i5"], "n": 1024, "beam_width": 1024})
    assert len({item["item_id"] for item in answer.json()["items"]}) == 1024


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        (b"", "json_invalid", ""),
        (b"{", "json_invalid", ""),
        (b"[]", "value_invalid", ""),
        (b"\xff\xfe{}", "json_invalid", ""),
        (b"[" * 100_000, "json_invalid", ""),
        (b'{"history": ["\\ud800"]}', "json_invalid", ""),
        ({}, "missing_key", "history"),
        ({"history": []}, "history_empty", "history"),
        ({"history": [[], []]}, "history_empty", "history"),
        ({"history": "i5"}, "value_invalid", "history"),
        ({"history": None}, "value_invalid", "history"),
        ({"history": [5]}, "value_invalid", "history[0]"),
        ({"history": ["i5", ["i1", [""]]]}, "value_invalid", "history[1][1]"),
        ({"history": ["i5", ""]}, "value_invalid", "history[1]"),
        ({"history": ["x" * 513]}, "value_invalid", "history[0]"),
        ({"history": ["i5"] * 10_001}, "history_too_long", "10000"),
        ({"history": ["i5"], "n": 0}, "n_out_of_range", "0"),
        ({"history": ["i5"], "n": -3}, "n_out_of_range", "-3"),
        ({"history": ["i5"], "n": 1025}, "n_out_of_range", "1025"),
        ({"history": ["i5"], "n": 10**40}, "n_out_of_range", ""),
        ({"history": ["i5"], "n": "10"}, "value_invalid", "'n'"),
        ({"history": ["i5"], "n": True}, "value_invalid", "'n'"),
        ({"history": ["i5"], "n": 1.5}, "value_invalid", "'n'"),
        ({"history": ["i5"], "n": None}, "value_invalid", "'n'"),
        ({"history": ["i5"], "n": 5, "beam_width": 4}, "beam_width_out_of_range", "4"),
        ({"history": ["i5"], "beam_width": 5000}, "beam_width_out_of_range", "5000"),
        ({"history": ["i5"], "beamwidth": 20}, "unknown_key", "beam_width"),
        ({"history": ["i5"], "exclude": "i1"}, "value_invalid", "exclude"),
        ({"history": ["i5"], "exclude": [1]}, "value_invalid", "exclude[0]"),
        ({"history": ["i5"], "allow": []}, "allow_empty", "allow"),
        ({"history": ["i5"], "exclude_seen": 1}, "value_invalid", "exclude_seen"),
        ({"history": ["i5"], "unknown": "ignore"}, "value_invalid", "unknown"),
        ({"history": ["i5"], "cold": "x"}, "value_invalid", "cold"),
        ({"history": ["i5"], "timeout_ms": 0}, "value_invalid", "'timeout_ms'"),
        ({"history": ["i5"], "timeout_ms": -5}, "value_invalid", "'timeout_ms'"),
        ({"history": ["i5"], "timeout_ms": 5.5}, "value_invalid", "'timeout_ms'"),
        ({"history": ["i5"], "timeout_ms": True}, "value_invalid", "'timeout_ms'"),
        ({"history": ["i5"], "timeout_ms": "50"}, "value_invalid", "'timeout_ms'"),
        ({"history": ["i5"], "timeout": 5}, "unknown_key", "timeout_ms"),
        ({"history": ["unknown_is_an_error"]}, "unknown_items", "x"),
    ],
)
def test_recommend_refuses(client: httpx.Client, body: Any, code: str, told: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post("/v1/recommend", content=content, headers=JSON)
    assert told in refused(answer, 400, code)["message"]


def test_refusal_tells_at_most_three_faults(client: httpx.Client) -> None:
    body = {"history": ["i5"], "exclude": list(range(50))}
    assert "47 more" in refused(client.post("/v1/recommend", json=body), 400, "value_invalid")["message"]


def test_body_limits(client: httpx.Client) -> None:
    big = b'{"history": ["' + b"x" * (5 << 20) + b'"]}'
    refused(client.post("/v1/recommend", content=big, headers=JSON), 413, "body_too_large")

    def chunks() -> Any:  # no Content-Length: counted while it arrives
        for start in range(0, len(big), 1 << 16):
            yield big[start : start + (1 << 16)]

    refused(client.post("/v1/recommend", content=chunks(), headers=JSON), 413, "body_too_large")
    form = client.post("/v1/recommend", data={"history": "i5"})
    refused(form, 415, "content_type_unsupported")


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    refused(client.get("/v1/recomend"), 404, "path_unknown")
    refused(client.post("/v1/recommend/", json={}), 404, "path_unknown")
    answer = client.get("/v1/recommend")
    assert "POST" in refused(answer, 405, "method_not_allowed")["remedy"]
    assert answer.headers["Allow"] == "POST"
    refused(client.put("/metrics"), 405, "method_not_allowed")


def test_our_own_mistake_has_the_same_shape_and_a_traceback_in_the_log(
    client: httpx.Client, server: ServerProcess
) -> None:
    answer = client.post("/v1/recommend", json={"history": ["boom"]}, headers={"X-Request-ID": "boom-1"})
    assert "a bug" not in refused(answer, 500, "internal_error")["message"]
    line = server.log_of("boom-1")
    assert (line["level"], line["status"], line["code"]) == ("error", 500, "internal_error")
    told = "the traceback is logged"
    eventually(lambda: any("a bug in the engine" in line.get("traceback", "") for line in server.logs()), told)


def test_request_ids(client: httpx.Client) -> None:
    first, second = (client.get("/health").headers["X-Request-ID"] for _ in range(2))
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert first != second
    bad = client.get("/health", headers={"X-Request-ID": 'x" injected'})
    assert re.fullmatch("[0-9a-f]{32}", bad.headers["X-Request-ID"])


def test_chat_answers(client: httpx.Client) -> None:
    body = {
        "model": "my-model",
        "messages": [
            {"role": "system", "content": "not read: this folder has no chat template"},
            {"role": "user", "content": "<s_a_1><s_b_2><s_c_3>"},
        ],
        "n": 2,
        "max_tokens": 5,
        "temperature": 0,
    }
    answer = client.post("/v1/chat/completions", json=body, headers={"X-Request-ID": "chat-1"}).json()
    assert answer.pop("created") > 0
    assert answer == {
        "id": "chatcmpl-chat-1",
        "object": "chat.completion",
        "model": "my-model",
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": f"<|sid_begin|><s_a_0><s_b_0><s_c_{index}><|sid_end|>"},
                "finish_reason": "stop",
                "sglext": {"sequence_score": -float(index)},
            }
            for index in range(2)
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14},
    }


@pytest.mark.parametrize(
    ("change", "status", "code", "told"),
    [
        ({"messages": []}, 400, "value_invalid", "messages"),
        ({"messages": None}, 400, "value_invalid", "messages"),
        ({"messages": [{"role": "user"}]}, 400, "missing_key", "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "value_invalid", "role"),
        ({"messages": [{"role": "user", "content": "hello <s_a_1> <s_a_99>"}]}, 400, "unknown_tokens", "'hello'"),
        ({"messages": [{"role": "user", "content": "<s_a_1> <s_a_99>"}]}, 400, "unknown_tokens", "'<s_a_99>'"),
        ({"messages": [{"role": "user", "content": "<unk>"}]}, 400, "unknown_tokens", "<unk>"),
        ({"messages": [{"role": "user", "content": " "}]}, 400, "prompt_empty", ""),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "user_message_missing", "user"),
        ({"temperature": 0.7}, 400, "sampling_unsupported", "0.7"),
        ({"stream": True}, 400, "stream_unsupported", ""),
        ({"top_p": 0.5}, 400, "unknown_key", "top_p"),
        ({"max_tokens": 2}, 400, "max_tokens_too_small", "3"),
        ({"max_tokens": 0}, 400, "value_invalid", "max_tokens"),
        ({"n": 0}, 400, "n_out_of_range", "0"),
        ({"n": 1025}, 400, "n_out_of_range", "1025"),
        ({"timeout_ms": 0}, 400, "value_invalid", "timeout_ms"),
        ({"model": "gpt"}, 404, "model_not_found", "gpt"),
    ],
)
def test_chat_refuses(client: httpx.Client, change: dict[str, Any], status: int, code: str, told: str) -> None:
    body = {"messages": [{"role": "user", "content": "<s_a_1><s_b_2><s_c_3>"}], **change}
    assert told in refused(client.post("/v1/chat/completions", json=body), status, code)["message"]


def test_models_and_probes(client: httpx.Client) -> None:
    models = client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["my-model"]
    assert client.get("/health").json()["status"] == "ok"
    assert client.get("/ready").json() == {"stage": "ready"}


def test_openapi_names_the_bodies(client: httpx.Client) -> None:
    page = client.get("/openapi.json").json()
    schema = page["paths"]["/v1/recommend"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rsplit("/", 1)[1]
    assert "exclude_seen" in page["components"]["schemas"][name]["properties"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(page)))
    assert references <= set(page["components"]["schemas"])


def test_metrics_count(client: httpx.Client) -> None:
    counted = 'polyrec_http_requests_total{endpoint="/v1/recommend",status="200"}'
    refusals = 'polyrec_errors_total{code="n_out_of_range"}'
    names = (counted, refusals, "polyrec_items_returned_total", "polyrec_unknown_items_total")
    before = [metric(client, name) for name in names]
    client.post("/v1/recommend", json={"history": ["i5", "nowhere"], "n": 7})
    client.post("/v1/recommend", json={"history": ["i5"], "n": 0})
    client.get("/v1/" + "x" * 50)
    expected = [old + new for old, new in zip(before, [1, 1, 7, 1], strict=True)]
    eventually(lambda: [metric(client, name) for name in names] == expected, f"{names} become {expected}")
    assert metric(client, "polyrec_ready") == 1
    assert metric(client, "polyrec_queue_limit") == 64
    assert metric(client, "polyrec_engine_requests_total") > 0
    assert metric(client, 'polyrec_http_request_seconds_count{endpoint="/v1/recommend"}') > 0
    assert "xxxx" not in client.get("/metrics").text


def test_documented_metrics_are_the_real_ones(client: httpx.Client) -> None:
    client.post("/v1/recommend", json={"history": ["i5"]})
    client.get("/nowhere")
    shown = set(re.findall(r"^# TYPE (polyrec_\w+) (?!unknown)", client.get("/metrics").text, re.MULTILINE))
    shown = {name for name in shown if not name.endswith("_created")}
    documented = set(re.findall(r"^\| `(polyrec_\w+)", DOC.read_text(encoding="utf-8"), re.MULTILINE))
    assert shown == documented


def test_documented_error_codes_are_those_of_the_code() -> None:
    package = Path(__file__).parents[2] / "src/polyrec"
    files = [*(package / "server").glob("*.py"), package / "engine" / "loop.py"]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    raised = set(re.findall(r'RequestError\(\s*"(\w+)"', sources)) | set(re.findall(r'"\w+": \("(\w+)",', sources))
    documented = set(re.findall(r"^\| `(\w+)` \| \d{3}", DOC.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(raised) > 20
    assert {"queue_full", "engine_failed"} <= raised
    assert raised <= documented


def test_logs_are_json_lines_with_the_request(client: httpx.Client, server: ServerProcess) -> None:
    client.post("/v1/recommend", json={"history": ["i5"], "n": 4}, headers={"X-Request-ID": "log-1"})
    client.post("/v1/recommend", json={"history": ["i5"], "n": 0}, headers={"X-Request-ID": "log-2"})
    good, bad = server.log_of("log-1"), server.log_of("log-2")
    assert (good["status"], good["path"], good["num_items"], good["source"]) == (200, "/v1/recommend", 4, "model")
    assert good["ms"] > 0
    assert (bad["status"], bad["code"]) == (400, "n_out_of_range")


def test_garbage_instead_of_http(server: ServerProcess, client: httpx.Client) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"\x16\x03\x01 not http\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert client.get("/health").status_code == 200
