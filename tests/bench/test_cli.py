"""`polyrec bench` as a user runs it, on a small synthetic model."""

import json
import os
import subprocess
import sys

import pytest

from polyrec.bench.offline import fault_of_scores, with_settings
from polyrec.core.errors import ConfigError
from polyrec.engine.searches import SearchResult
from polyrec.hardware import get_hardware_backend
from polyrec.hardware.base.config import HardwareConfig

PNG = b"\x89PNG"


def bench(*words, status=0):
    """Standard output and error of one command."""
    done = subprocess.run(
        [sys.executable, "-m", "polyrec.cli.main", "bench", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    bench("make-model", folder, "--shape", "tiny", "--items", 2000, "--max-items", 60)
    return folder


def test_offline_measures_each_case_and_writes_figures_picture_and_traces(folder, tmp_path):
    out, plot, trace = tmp_path / "o.json", tmp_path / "o.png", tmp_path / "t.json"
    words = ["--case", "h9:8:1,3", "--case", "h20:40:2", "--requests", "7", "--warmup", "1"]
    stdout, _ = bench("offline", folder, *words, "--out", out, "--plot", plot, "--profile", trace, "--json")
    facts = json.loads(out.read_text())
    assert json.loads(stdout) == facts
    assert facts["finished"] is True
    assert [(row["items"], row["n"], row["batch"]) for row in facts["results"]] == [(9, 8, 1), (9, 8, 3), (20, 40, 2)]
    assert [row["requests"] for row in facts["results"]] == [7, 9, 8]
    for row in facts["results"]:
        assert row["faulty_answers"] == 0
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert facts["origin"]["command"].startswith("polyrec bench offline tiny")
    assert plot.read_bytes().startswith(PNG)
    names = sorted(path.name for path in tmp_path.glob("t-*.json"))
    assert names == ["t-20-40-2.json", "t-9-8-1.json", "t-9-8-3.json"]
    assert json.loads((tmp_path / names[0]).read_text())["traceEvents"]


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(folder, tmp_path):
    (tmp_path / "file").touch()
    stdout, told = bench("offline", folder, "--case", "h9:8:1:5", "--out", tmp_path / "file" / "o.json", status=2)
    assert "path_unusable" in told
    assert "p50_ms" not in told + stdout


def test_a_run_that_is_stopped_keeps_the_cases_that_it_measured(folder, tmp_path):
    out = tmp_path / "o.json"
    words = ["--case", "h9:8:1:5", "--case", "h9:8:1:1000000", "--out", out]
    command = [sys.executable, "-m", "polyrec.cli.main", "bench", "offline", folder, *words]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = next(line for line in process.stderr if "p50_ms" in line)
        process.kill()
    assert told.startswith("tokens 37, n 8, batch 1, p50_ms ")
    facts = json.loads(out.read_text())
    assert facts["finished"] is False
    assert [row["requests"] for row in facts["results"]] == [5]


def test_kernels_name_where_the_time_goes(folder, tmp_path):
    plot = tmp_path / "k.png"
    ceilings = ["--tflops", "0.1", "--fp8-tflops", "0.2", "--tb-per-s", "0.02"]
    words = ["--history", "9", "--n", "8", "--batch", "2", "--batches", "2", *ceilings]
    facts = json.loads(bench("kernels", folder, *words, "--plot", plot, "--json")[0])
    assert plot.read_bytes().startswith(PNG)
    (row,) = facts["results"]
    assert facts["ceilings"] == {"tflops": 0.1, "fp8_tflops": 0.2, "tb_per_s": 0.02}
    assert {"products", "attention", "norms"} <= {family["family"] for family in row["families"]}
    assert row["busy_ms"] == pytest.approx(sum(family["ms"] for family in row["families"]))
    assert row["wall_ms"] == pytest.approx(row["busy_ms"] + row["gaps_ms"])
    assert row["roofline_ms"] == pytest.approx(sum(phase["least_ms"] for phase in row["phases"]))
    assert [phase["name"] for phase in row["phases"]] == ["prefill", "pass 1", "pass 2"]


def test_serve_starts_a_server_and_checks_its_answers(folder, tmp_path):
    plot = tmp_path / "s.png"
    words = ["--case", "h9:8:1,3", "--requests", "12", "--warmup", "1", "--plot", plot, "--json"]
    facts = json.loads(bench("serve", folder, *words, "--", "--num-threads", "1")[0])
    assert [row["clients"] for row in facts["results"]] == [1, 3]
    for row, warm in zip(facts["results"], (1, 3), strict=True):
        assert (row["requests"], row["faulty_answers"]) == (12, 0)
        assert row["counters"]["polyrec_engine_requests_total"] == 12 + warm
    assert facts["ready_seconds"] > 0
    device = get_hardware_backend(HardwareConfig(device="cpu")).runtime.device_name()
    assert facts["server"] == {"device": device, "graph_bytes": 0}
    assert facts["server_options"] == ["--num-threads", "1"]
    assert plot.is_file()


def test_serve_traces_its_server_once_a_case_is_measured(folder, tmp_path):
    words = ["--history", "9", "--n", "8", "--requests", "4", "--warmup", "1", "--json", "--", "--num-threads", "1"]
    trace = tmp_path / "made" / "t.json"
    facts = json.loads(bench("serve", folder, "--clients", "2", "--profile", trace, *words)[0])
    assert list(trace.parent.iterdir()) == [trace]
    assert "aten::embedding" in {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert facts["server_options"] == ["--num-threads", "1"]
    assert (
        facts["results"][0]["counters"]["polyrec_engine_requests_total"] == 4 + 2
    )  # the trace's own are not among them
    bench("serve", folder, "--rate", "10,20", "--profile", tmp_path / "r.json", *words)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["r-9-8-10.json", "r-9-8-20.json"]


def test_an_open_loop_has_rates_instead_of_clients(folder):
    words = ["--history", "9", "--n", "8", "--rate", "40,80", "--requests", "10", "--json"]
    facts = json.loads(bench("serve", folder, *words)[0])
    assert [(row["rate"], row["clients"], row["requests"]) for row in facts["results"]] == [
        (40.0, None, 10),
        (80.0, None, 10),
    ]


def test_cache_asks_every_user_twice(folder, tmp_path):
    plot = tmp_path / "c.png"
    words = ["--history", "9", "--n", "8", "--users", "5", "--new-items", "2", "--plot", plot, "--json"]
    first, returning = json.loads(bench("cache", folder, *words)[0])["results"]
    assert plot.read_bytes().startswith(PNG)
    assert (first["visit"], first["items"], first["requests"]) == ("first_visit", 7, 5)
    assert (returning["visit"], returning["items"], returning["requests"]) == ("returning", 9, 5)
    assert first["faulty_answers"] == returning["faulty_answers"] == 0
    found = [row["counters"].get("polyrec_engine_hit_tokens_total", 0) for row in (first, returning)]
    assert found[1] >= 5 * 16 > found[0]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["offline", "--case", "9:8"], "case_invalid"),
        (["offline", "--history", "61"], "case_out_of_range"),
        (["offline", "--history", "9", "--set", "limits.max_requests"], "setting_invalid"),
        (["offline", "--history", "9", "--set", "limits.max_request=3"], "config_invalid"),
        (["cache", "--history", "3", "--new-items", "3"], "case_out_of_range"),
        (["serve", "--url", "http://127.0.0.1:9", "--history", "3", "--", "--port", "1"], "server_options_unused"),
        (["serve", "--history", "3", "--", "--max-batch", "0"], "server_ended"),
        (["serve", "--url", "http://127.0.0.1:9", "--history", "3", "--profile", "t.json"], "profile_elsewhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder, words, code):
    _, told = bench(words[0], folder, *words[1:], status=2)
    assert code in told


def test_settings_reach_into_groups():
    assert with_settings({"a": {"b": 1}}, ["a.c=2", "d=none", "e.f.g=x=y"]) == {
        "a": {"b": 1, "c": "2"},
        "d": None,
        "e": {"f": {"g": "x=y"}},
    }
    for text in ("a", "=3", "a.=3", "a.b.c=3"):
        with pytest.raises(ConfigError):
            with_settings({"a": {"b": 1}}, [text])


@pytest.mark.parametrize("scores", [[-1.0, -0.5], [-1.0, float("nan")], [float("-inf")]])
def test_scores_out_of_order_are_a_fault(scores):
    assert fault_of_scores(SearchResult([], scores))
    assert fault_of_scores(SearchResult([], [-0.5, -0.5, -2.0])) is None
