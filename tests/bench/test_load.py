"""Client processes against a small HTTP server whose every answer is known."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from polyrec.bench.load import LoadError, part_of, run_load
from polyrec.bench.server import grown
from polyrec.sid.catalog import Catalog
from polyrec.sid.layout import SidLayout

CODES = np.array(list(np.ndindex(4, 5)), np.int32)
LAYOUT = SidLayout.contiguous((4, 5), 0)


class Handler(BaseHTTPRequestHandler):
    """Answers what the body asks for: {"rows": [...]} or {"status": 500}."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers["Authorization"], body, time.perf_counter()))
        with self.server.guard:
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        time.sleep(0.01)
        with self.server.guard:
            self.server.now -= 1
        items = [{"item_id": f"i{row}", "sid": LAYOUT.text(CODES[row])} for row in body.get("rows", [])]
        answer = json.dumps({"items": items, "source": body.get("source", "model")}).encode()
        self.send_response(body.get("status", 200))
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    Catalog([f"i{row}" for row in range(20)], CODES, [None] * 20, np.zeros(20)).save(tmp_path / "catalog.parquet")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        one.seen, one.guard, one.now, one.most = [], threading.Lock(), 0, 0
        one.url = f"http://127.0.0.1:{one.server_port}"
        one.catalog = tmp_path / "catalog.parquet"
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def body(number=0, **values):
    return json.dumps({"rows": [1, 2, 3], "number": number, **values}).encode()


@pytest.mark.parametrize(("clients", "processes"), [(1, 1), (3, 2), (5, 9)])
def test_every_body_is_sent_once_by_so_many_clients(server, clients, processes):
    bodies = [body(number) for number in range(20)]
    warmup = [body(100 + number) for number in range(4)]
    found = run_load(server.url, bodies, 3, clients, server.catalog, warmup=warmup, processes=processes, api_key="key")
    numbers = [sent["number"] for _, _, sent, _ in server.seen]
    assert sorted(numbers[:4]) == [100, 101, 102, 103], "the warm-up comes first, everywhere"
    assert sorted(numbers[4:]) == list(range(20))
    assert {(path, key) for path, key, _, _ in server.seen} == {("/v1/recommend", "Bearer key")}
    assert server.most <= clients
    assert (found["requests"], found["faulty_answers"]) == (20, 0)
    assert found["client_processes"] == min(clients, processes)
    assert found["p50_ms"] >= 10
    assert found["requests_per_second"] == pytest.approx(20 / found["seconds"])


@pytest.mark.parametrize(("clients", "processes"), [(8, 6), (32, 6), (5, 5), (3, 1)])
def test_all_clients_have_as_much_to_ask(clients, processes):
    parts = [part_of(range(400), place, processes, clients) for place in range(processes)]
    assert sorted(number for part in parts for number in part) == list(range(400))
    for place, part in enumerate(parts):
        own = len(range(place, clients, processes))
        assert own * (400 // clients) <= len(part) <= own * -(-400 // clients)


def test_faulty_answers_are_counted_and_refusals_have_no_latency(server):
    wrong = [body(rows=[1, 2]), body(rows=[1, 2, 1]), body(status=429), body(source="popularity")]
    found = run_load(server.url, [body(), *wrong, body()], 3, 2, server.catalog)
    assert (found["requests"], found["faulty_answers"]) == (5, 4)


def test_an_open_loop_sends_when_requests_are_due_and_counts_from_then(server):
    rate, num = 50.0, 30
    found = run_load(server.url, [body(number) for number in range(num)], 3, 1, server.catalog, rate=rate, seed=3)
    due = np.cumsum(np.random.default_rng(3).exponential(1 / rate, num))
    sent = np.array([when for *_, when in sorted(server.seen, key=lambda one: one[2]["number"])])
    late = (sent - sent[0]) - (due - due[0])
    # All at once would be 0.6 s early at the end; on a busy machine the first, from which is counted, may itself be late.
    assert late.min() > -0.3, "none is sent early"
    assert found["seconds"] >= due[-1]
    assert (found["requests"], found["faulty_answers"]) == (num, 0)


def test_no_server_is_told(tmp_path, server):
    with pytest.raises(LoadError, match="answered no request") as caught:
        run_load("http://127.0.0.1:9", [body()], 3, 1, server.catalog)
    assert caught.value.code == "no_answers"


def test_only_what_polyrecs_counters_gained_is_kept():
    before = {"polyrec_a_total": 3.0, 'polyrec_b_total{x="1"}': 1.0, "python_c_total": 1.0}
    after = {
        "polyrec_a_total": 5.0,
        'polyrec_b_total{x="1"}': 1.0,
        'polyrec_b_total{x="2"}': 4.0,
        "python_c_total": 9.0,
    }
    assert grown(before, after | {"polyrec_depth": 7.0}) == {"polyrec_a_total": 2.0, 'polyrec_b_total{x="2"}': 4.0}
