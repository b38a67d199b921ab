"""docs/writing-a-plugin.md, followed literally in an empty folder: skeleton, edits, conformance, and the engine with it."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from polyrec.testing.tiny import write_tiny_model

from .blocks import DOCS, blocks_of, follow, install, run_python

PAGE = (DOCS / "writing-a-plugin.md").read_text(encoding="utf-8")
LOADED = ("--extra-ops", "swift_ops,swift_infer", "--extra-att", "swift_att")
ENGINE = """
import json, sys
from polyrec import Recommender
from polyrec.hardware import get_hardware_backend
recommender = Recommender.from_pretrained("model", extra_ops=["swift_ops", "swift_infer"], extra_att=["swift_att"])
answer = recommender.recommend(["item-1", "item-2"], n=10)
table = get_hardware_backend().table
print(json.dumps({"items": [item.item_id for item in answer.items],
                  "calls": {field: calls.count for field, calls in table.calls.items()}}))
"""


def commands() -> list[list[str]]:
    """The lines of all bash blocks, in order."""
    lines = [line for block in blocks_of(PAGE) if block.language == "bash" for line in block.text.splitlines()]
    return [shlex.split(line) for line in lines if line]


def polyrec(folder, words, *path) -> str:
    code = "from polyrec.cli.main import main; main()"
    return run_python(["-c", code, *words], *path, cwd=folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The skeleton, made by the page's first command, with the page's blocks, as if installed; and a model beside it."""
    folder = tmp_path_factory.mktemp("plugin")
    assert commands()[0] == ["polyrec", "plugins", "new", "polyrec-swift"]
    polyrec(folder, commands()[0][1:])
    assert len(follow(PAGE, folder)) == 6
    install(folder / "polyrec-swift")
    write_tiny_model(folder / "model", num_items=60)
    return folder


def run(built, *words: str) -> str:
    return polyrec(built, words, built / "polyrec-swift")


def test_plugins_lists_what_each_would_register(built):
    report = json.loads(run(built, "plugins", "--json"))
    found = {plugin["name"]: plugin for plugin in report["plugins"] if plugin["distribution"] == "polyrec-swift"}
    registers = {name: [one["key"] for one in plugin["registers"]] for name, plugin in found.items()}
    assert registers == {"swift_ops": ["norm.rms_norm"], "swift_infer": ["act.silu_and_mul"], "swift_att": ["swift"]}
    assert not any(plugin["faults"] for plugin in found.values())
    assert {plugin["version"] for plugin in found.values()} == {"0.2.0"}


def test_its_own_conformance_tests_pass(built):
    words = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests"]
    out = run_python(words, built / "polyrec-swift", cwd=built / "polyrec-swift")
    passed = re.search(r"(\d+) passed", out)
    assert passed, out
    assert int(passed.group(1)) > 20, out
    reasons = [line for line in out.splitlines() if line.startswith("SKIPPED")]
    not_claimed = "sliding window|soft cap|cached prefixes"
    assert [line for line in reasons if not re.search(not_claimed, line)] == []


def test_the_pages_commands_run(built):
    last = [words for words in commands() if words[0] == "polyrec"][1:]
    assert [words[1] for words in last] == ["plugins", "devices", "recommend"]
    shown = [run(built, *words[1:]) for words in last]
    assert "polyrec.ops_plugin" in shown[0]
    assert "swift_infer (polyrec-swift 0.2.0)" in shown[1]
    assert "item-" in shown[2]


def test_devices_shows_the_fields_as_the_plugins(built):
    chosen = json.loads(run(built, "devices", "--json", "--hardware-platform", "cpu", *LOADED))["chosen"]
    sources = {row["field"]: row["source"] for row in chosen["ops"] if row["origin"] == "plugin"}
    assert sources == {
        "norm.rms_norm": "swift_ops (polyrec-swift 0.2.0)",
        "act.silu_and_mul": "swift_infer (polyrec-swift 0.2.0)",
    }
    assert chosen["attention"]["picked"] == "swift"


def test_the_engine_calls_it_and_recommends_the_same(built):
    found = json.loads(run_python(["-c", ENGINE], built / "polyrec-swift", cwd=built).splitlines()[-1])
    words = ("recommend", "model", "--history", "item-1;item-2", "-n", "10", "--json", "--hardware-platform", "cpu")
    plain = json.loads(run(built, *words))
    assert found["items"] == [item["item_id"] for item in plain["items"]]
    assert found["calls"]["norm.rms_norm"] > 0
    assert found["calls"]["act.silu_and_mul"] > 0


@pytest.mark.parametrize(("plugins", "code"), [("swift_ops", None), ("swift_ops,swift_infer", "op_infer_only")])
def test_training_takes_the_one_with_a_gradient_and_refuses_the_other(built, plugins, code):
    text = f"""
from polyrec.core.errors import HardwareError
from polyrec.hardware import HardwareConfig, build_hardware_backend
try:
    build_hardware_backend(HardwareConfig(hardware_platform="cpu", extra_ops="{plugins}", purpose="train"))
    print(None)
except HardwareError as error:
    print(error.code)
"""
    assert run_python(["-c", text], built / "polyrec-swift", cwd=built).split() == [str(code)]


def test_a_pin_names_the_plugin(built):
    words = ("recommend", "model", "--history", "item-1", *LOADED, "--hardware-platform", "cpu")
    assert "item-" in run(built, *words, "--op", "norm.rms_norm=swift_ops")
    with pytest.raises(AssertionError, match="pin_unused"):
        run(built, *words, "--op", "norm.rms_norm=swift_infer")
