"""docs/your-data.md, run as a user would: every fenced command literally, in order, the server in the background."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "your-data.md"
FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIVE = ["polyrec prepare", "polyrec train", "polyrec evaluate", "polyrec serve", "curl"]


def blocks():
    """(language, text) of each fenced block, in order."""
    return FENCE.findall(DOC.read_text(encoding="utf-8"))


class Shell:
    """Runs commands one by one in a shell of its own home, and stays in the folder that a command changes to."""

    def __init__(self, home: Path) -> None:
        self.folder = ROOT
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "HOME": str(home), "PATH": path, "COLUMNS": "160"}

    def run(self, command: str) -> str:
        """Standard output and error; a failing command fails the test."""
        script = f"{command}\nstatus=$?; echo; pwd; exit $status"
        done = subprocess.run(
            ["sh", "-c", script], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        output, _, folder = done.stdout.rstrip("\n").rpartition("\n")
        self.folder = Path(folder)
        return output + done.stderr

    def start(self, command: str) -> subprocess.Popen[str]:
        """A command that goes on running."""
        return subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """command's first two words -> its output; and the folder where it all lies."""
    shell = Shell(tmp_path_factory.mktemp("home"))
    outputs: list[tuple[str, str]] = []
    server = None
    try:
        for language, text in blocks():
            if language == "python":
                (shell.folder / "snippet.py").write_text(text, encoding="utf-8")
                outputs.append(("python", shell.run(f"{sys.executable} snippet.py")))
            elif text.startswith("polyrec serve"):
                server = shell.start(text.strip())
                wait_ready(server)
            elif text.startswith("curl"):
                outputs.append(("curl", shell.run(text) if shutil.which("curl") else by_urllib(text)))
            else:
                outputs.append((" ".join(text.split()[:2]), shell.run(text.strip())))
        yield dict(outputs), outputs, shell.folder
        if server is not None:
            server.send_signal(signal.SIGINT)  # Ctrl-C, as the document says
            assert server.wait(60) == 0
    finally:
        if server is not None:
            server.kill()
            server.wait()
            server.stdout.close()


def wait_ready(server: subprocess.Popen[str]) -> None:
    """Reads the server's two lines."""
    stages = []
    end = time.monotonic() + 60
    while not stages or stages[-1] != "ready":
        line = server.stdout.readline()
        assert line, f"the server ended with {server.wait()} (is its port taken?)"
        assert time.monotonic() < end
        stages.append(json.loads(line)["stage"])
    assert stages == ["loading", "ready"]


def by_urllib(command: str) -> str:
    """The same request where curl is not installed."""
    url = re.search(r"http://\S+", command)[0]
    body = re.search(r"-d '(.*)'", command)[1].encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def test_five_commands_from_two_files_to_an_answer():
    text = DOC.read_text(encoding="utf-8")
    section = text[text.index("## Five commands") : text.index("## Without a server")]
    commands = [block for language, block in FENCE.findall(section) if language == "bash"]
    assert len(commands) == len(FIVE)
    assert all(command.startswith(start) for command, start in zip(commands, FIVE, strict=True))


def test_the_answer_is_what_the_text_says(session):
    answer = json.loads(session[0]["curl"])
    assert [item["rank"] for item in answer["items"]] == [1, 2, 3, 4, 5]
    assert all(item["name"] and item["sid"] and item["score"] < 0 for item in answer["items"])
    assert answer["source"] == "model"
    assert not {"P001", "P004", "P007"} & {item["item_id"] for item in answer["items"]}
    # The shop's camping customers go on with mats and stoves; the model has learnt that much.
    assert answer["items"][0]["name"].endswith(("Sleeping Mat", "Camp Stove"))


def test_terminal_python_and_server_agree(session):
    outputs, commands, _ = session
    served = json.loads(outputs["curl"])["items"]
    printed = [line.split(maxsplit=2) for line in outputs["python"].strip().splitlines()]
    assert [(item["item_id"], item["name"]) for item in served] == [(line[0], line[2]) for line in printed]
    table = next(output for name, output in commands if name == "polyrec recommend")
    assert all(item["item_id"] in table for item in served)


def test_the_file_of_recommendations(session):
    _, _, folder = session
    with open(folder / "recommendations.csv", newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    with open(folder / "events.csv", newline="", encoding="utf-8") as stream:
        bought = {(row["customer_id"], row["product_id"]) for row in csv.DictReader(stream)}
    users = {user for user, _ in bought}
    assert {row["user"] for row in rows} == users
    assert len(rows) == 10 * len(users)
    assert not bought & {(row["user"], row["item_id"]) for row in rows}
    columns = re.findall(r"^\| (`.*`) \|", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name for cell in columns for name in re.findall(r"`(\w+)`", cell)}
    assert set(rows[0]) <= documented


def test_the_model_beats_popularity_as_the_table_shows(session):
    outputs, _, folder = session
    result = json.loads((folder / "evaluation" / "evaluation.json").read_text(encoding="utf-8"))
    ndcg = {
        method: values["metrics"]["NDCG@10"]["mean"] for method, values in result["protocols"]["new"]["methods"].items()
    }
    assert ndcg["Polyrec"] > 3 * ndcg["popularity"]
    assert "basket itemKNN" in outputs["polyrec evaluate"]


def test_the_counts_in_the_text_are_the_data_s(session):
    _, _, folder = session
    text = DOC.read_text(encoding="utf-8")
    with open(folder / "events.csv", newline="", encoding="utf-8") as stream:
        events = list(csv.DictReader(stream))
    assert f"{len({row['customer_id'] for row in events})} customers" in text
    assert f"{len({row['order_id'] for row in events}):,} orders" in text
    head = "\n".join(f"    {line}" for line in (folder / "events.csv").read_text(encoding="utf-8").splitlines()[:4])
    assert head in text


def test_the_shop_is_what_its_script_makes(tmp_path):
    shop = ROOT / "examples" / "shop"
    shutil.copy(shop / "make_shop.py", tmp_path)
    subprocess.run([sys.executable, "make_shop.py"], cwd=tmp_path, check=True, timeout=60)
    for name in ("events.csv", "items.csv"):
        assert (tmp_path / name).read_bytes() == (shop / name).read_bytes()
        assert (shop / name).stat().st_size < 200_000


def test_documented_flags_and_codes_exist():
    text = DOC.read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "polyrec").rglob("*.py"))
    table = text[text.index("## When something is wrong") :]
    codes = [code for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)]
    assert len(codes) > 10
    assert [code for code in codes if f'"{code}"' not in source and code != "not_utf8"] == []
    flags = set(re.findall(r"`?(--[a-z-]+)", text))
    spelled = {flag for flag in flags if f'"{flag}"' in source or flag[2:].replace("-", "_") + ":" in source}
    assert flags == spelled


def test_the_example_runs(session, tmp_path):
    _, _, folder = session
    example = [sys.executable, str(ROOT / "examples" / "recommend.py"), str(folder / "model")]
    done = subprocess.run(example, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "popularity" in done.stdout
    assert "Alder" in done.stdout
