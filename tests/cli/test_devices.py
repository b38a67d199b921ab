"""`polyrec devices`: the platforms with their reasons, the chosen one's table, errors in its place, exit codes, JSON keys."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import types
from pathlib import Path

import pytest
import torch

from polyrec import __version__
from polyrec.core.registry import Registry
from polyrec.hardware import HardwareConfig, platform_names
from polyrec.hardware.backends.cpu import CpuBackend
from polyrec.hardware.base import registry
from polyrec.hardware.base.attention import AttentionBackend, AttentionSupport
from polyrec.hardware.base.backend import Capabilities
from polyrec.hardware.base.probe import Probe
from polyrec.hardware.ops import PlatformOps
from polyrec.hardware.ops.spec import MISSING

# docs/devices.md lists these; a key that goes breaks scripts.
KEYS = {"polyrec", "python", "torch", "platforms", "chosen", "error"}
PLATFORM_KEYS = {"name", "state", "reason", "devices", "device_type", "remark"}
CHOSEN_KEYS = {
    *("platform", "remark", "device", "devices", "capabilities"),
    *("attention", "plugins", "ops", "fallbacks", "fingerprint"),
}
OP_KEYS = {"field", "implementation", "origin", "source", "tier", "fallback", "dtypes", "train", "graph_safe"}
MODULE = "polyrec_test_devices"


def probing(answer: Probe) -> classmethod:
    return classmethod(lambda cls: answer)


class Abacus(CpuBackend):
    """Usable, with two devices; one operation must fall back, and it is written only."""

    platform_name = "abacus"
    device_type = "cpu"
    remark = "Written, not run on this hardware."
    attention_order = ("sdpa",)
    probe = probing(Probe.usable(("Board 0", "Board 1"), "the frame is wooden"))

    def __init__(self) -> None:
        super().__init__()
        self.ops = dataclasses.replace(self.ops, norm=dataclasses.replace(self.ops.norm, add_rms_norm=MISSING))


class Loom(CpuBackend):
    """Its device is there and fails."""

    platform_name = "loom"
    device_type = "thread"
    probe = probing(Probe.failed("the warp is torn; mend it"))


class Bare(CpuBackend):
    """Lacks required operations."""

    platform_name = "bare"
    device_type = "bare"
    probe = probing(Probe.usable(("Nothing",)))

    def __init__(self) -> None:
        super().__init__()
        self.ops = dataclasses.replace(self.ops, act=dataclasses.replace(self.ops.act, silu_and_mul=MISSING))


class Chatty(CpuBackend):
    """Speaks whenever it is asked, as some vendors' libraries do."""

    platform_name = "chatty"
    device_type = "chatty"

    def __init__(self) -> None:
        print("here I am")
        super().__init__()

    @classmethod
    def probe(cls) -> Probe:
        print("what a question")
        return Probe.usable(("Parrot",))


class Torn(CpuBackend):
    """Answers yes, and cannot be built."""

    platform_name = "torn"
    device_type = "torn"
    probe = probing(Probe.usable(("Shuttle",)))

    def __init__(self) -> None:
        raise RuntimeError("out of thread")


class Elsewhere(AttentionBackend):
    """An attention for another platform."""

    support = AttentionSupport(platforms=("loom",), head_dims=(128,), dtypes=(torch.bfloat16,))


DOC = Path(__file__).parents[2] / "docs" / "devices.md"


@pytest.fixture
def machine(monkeypatch):
    """Registers the CPU and some of the platforms above."""
    module = types.ModuleType(MODULE)
    module.__dict__.update(Abacus=Abacus, Loom=Loom, Bare=Bare, Chatty=Chatty, Torn=Torn, Elsewhere=Elsewhere)
    monkeypatch.setitem(sys.modules, MODULE, module)

    def register(*classes, broken=False):
        platforms = Registry("platform", {"cpu": registry.platform_path("cpu")})
        for cls in classes:
            platforms.register(cls.platform_name, f"{MODULE}:{cls.__name__}")
        if broken:
            platforms.register("broken", "polyrec_test_not_installed:Backend")
        monkeypatch.setattr(registry, "_PLATFORMS", platforms)

    return register


@pytest.fixture
def report(polyrec):
    def run(*flags, exit_code=0):
        result = polyrec("devices", "--json", *flags)
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    return run


def platform_of(report, name):
    return next(found for found in report["platforms"] if found["name"] == name)


def test_it_is_complete_on_a_cpu(report):
    found = report("--hardware-platform", "cpu")
    assert set(found) == KEYS
    assert found["error"] is None
    assert (found["polyrec"], found["python"]) == (__version__, platform.python_version())
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["build"]["cuda"] == torch.version.cuda
    assert [platform["name"] for platform in found["platforms"]] == platform_names()
    for platform_found in found["platforms"]:
        assert set(platform_found) == PLATFORM_KEYS
        assert platform_found["state"] in ("usable", "absent", "failed")
        assert platform_found["reason"] or platform_found["state"] == "usable"
    chosen = found["chosen"]
    assert set(chosen) == CHOSEN_KEYS
    assert (chosen["platform"], chosen["device"]) == ("cpu", "cpu")
    assert set(chosen["capabilities"]) == {field.name for field in dataclasses.fields(Capabilities)}
    assert set(chosen["capabilities"]["dtypes"]) >= {"float32", "bfloat16"}
    [device] = chosen["devices"]
    assert device["selected"]
    assert device["name"] in platform_of(found, "cpu")["devices"]
    assert 0 < device["memory"]["free"] <= device["memory"]["total"]


def test_the_op_table_has_every_field_once(report):
    rows = report("--hardware-platform", "cpu")["chosen"]["ops"]
    groups = {field.name for field in dataclasses.fields(PlatformOps)}
    assert {row["field"].partition(".")[0] for row in rows} == groups
    assert len({row["field"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == OP_KEYS
        assert row["origin"] == "absent" or (row["implementation"] and row["dtypes"])
    row = next(row for row in rows if row["field"] == "norm.rms_norm")
    assert row["tier"] == "R"
    assert row["train"]
    assert not row["fallback"]


def test_the_page_names_every_key_and_flag(report):
    text = DOC.read_text(encoding="utf-8")
    found = report("--hardware-platform", "cpu")
    chosen = found["chosen"]
    [device] = chosen["devices"]
    nested = [*chosen["attention"], *chosen["attention"]["backends"][0], *device, *chosen["capabilities"]]
    flags = [f"--{name.replace('_', '-')}" for name in HardwareConfig.model_fields if name != "purpose"]
    for word in (*KEYS, *PLATFORM_KEYS, *CHOSEN_KEYS, *OP_KEYS, *nested, *flags):
        assert f"`{word}`" in text, word


def test_other_platforms_are_listed_with_the_reason(machine, report):
    machine(Abacus, Loom, broken=True)
    found = report()
    assert found["chosen"]["platform"] == "abacus"
    assert platform_of(found, "abacus") == {
        "name": "abacus",
        "state": "usable",
        "reason": "the frame is wooden",
        "devices": ["Board 0", "Board 1"],
        "device_type": "cpu",
        "remark": "Written, not run on this hardware.",
    }
    assert platform_of(found, "loom")["reason"] == "the warp is torn; mend it"
    broken = platform_of(found, "broken")
    assert (broken["state"], broken["device_type"]) == ("failed", None)
    assert "polyrec_test_not_installed" in broken["reason"]


def test_a_fallback_is_marked_and_refused_when_strict(machine, report):
    machine(Abacus)
    chosen = report()["chosen"]
    assert chosen["fallbacks"] == ["norm.add_rms_norm"]
    row = next(row for row in chosen["ops"] if row["field"] == "norm.add_rms_norm")
    assert (row["origin"], row["fallback"], row["tier"]) == ("decomposed", True, "D")
    assert "norm.rms_norm" in row["source"]
    inherited = next(row for row in chosen["ops"] if row["field"] == "linear.mm")
    assert (inherited["origin"], inherited["source"]) == ("inherited", "cpu")
    strict = report("--fallback", "strict", exit_code=2)
    assert (strict["chosen"], strict["error"]["code"]) == (None, "op_missing")
    assert "norm.add_rms_norm" in strict["error"]["message"]


def test_attention_backends_say_what_they_lack_and_which_is_picked(machine, report, monkeypatch):
    machine(Abacus)
    names = Registry("attention", {"sdpa": registry._ATTENTION.path("sdpa")})
    names.register("elsewhere", f"{MODULE}:Elsewhere")
    names.register("unbuilt", "polyrec_test_not_installed:Attention")
    monkeypatch.setattr(registry, "_ATTENTION", names)
    attention = report()["chosen"]["attention"]
    assert (attention["asked"], attention["picked"]) == ("auto", "sdpa")
    found = {backend["name"]: backend for backend in attention["backends"]}
    assert found["sdpa"]["usable"]
    assert found["sdpa"]["supports"]["train"]
    assert found["sdpa"]["supports"]["prefix"]
    assert found["elsewhere"]["lacking"] == ["platform abacus"]
    assert found["elsewhere"]["supports"]["dtypes"] == ["bfloat16"]
    assert not found["unbuilt"]["usable"]
    assert "polyrec_test_not_installed" in found["unbuilt"]["lacking"][0]
    assert report("--attention", "elsewhere")["chosen"]["attention"]["picked"] is None


@pytest.mark.parametrize(
    ("classes", "flags", "code", "exit_code"),
    [
        ([Abacus, Bare], [], "platforms_ambiguous", 0),
        ([Loom], [], "probe_failed", 0),
        ([Loom], ["--hardware-platform", "loom"], "platform_unusable", 2),
        ([Loom], ["--device", "thread:1"], "device_unknown", 2),
        ([Abacus], ["--hardware-platform", "abaci"], "platform_unknown", 2),
        ([Abacus], ["--hardware-platform", "cpu", "--device", "thread"], "device_platform_differs", 2),
        ([Bare], ["--hardware-platform", "bare"], "op_missing", 2),
        ([Bare], [], "op_missing", 0),
        ([Torn], [], "platform_build_failed", 0),
        ([], ["--attention", "sdpaa", "--hardware-platform", "cpu"], "attention_unknown", 2),
    ],
)
def test_an_error_takes_the_chosen_ones_place(machine, report, polyrec, classes, flags, code, exit_code):
    machine(*classes)
    found = report(*flags, exit_code=exit_code)
    assert found["chosen"] is None
    assert found["error"]["code"] == code
    assert found["error"]["remedy"]
    assert {platform["name"] for platform in found["platforms"]} == {"cpu", *(cls.platform_name for cls in classes)}
    shown = polyrec("devices", *flags)
    assert shown.exit_code == exit_code
    assert code in shown.output
    assert "Traceback" not in shown.output


def test_what_a_platform_prints_is_not_in_the_json(machine, report, polyrec):
    machine(Chatty)
    assert report()["chosen"]["platform"] == "chatty"
    assert "here I am" in polyrec("devices", "--json").stderr


def test_what_others_wrote_is_shown_as_it_is(machine, report, polyrec, monkeypatch):
    """Square brackets are markup to what prints the tables."""
    monkeypatch.setattr(Abacus, "remark", "Beads [red] and [/wood].")
    monkeypatch.setattr(Loom, "probe", probing(Probe.failed("the warp [bold]is[/] torn")))
    machine(Abacus, Loom)
    attention = Registry("attention", {"sdpa": registry._ATTENTION.path("sdpa"), "a[/b]": f"{MODULE}:Elsewhere"})
    monkeypatch.setattr(registry, "_ATTENTION", attention)
    shown = " ".join(polyrec("devices").output.split())
    for words in ("Beads [red] and [/wood].", "the warp [bold]is[/] torn", "a[/b]"):
        assert words in shown


def test_tables_for_people_are_whole_at_100_columns(machine, monkeypatch):
    from typer.testing import CliRunner

    from polyrec.cli.main import build_app
    from polyrec.hardware import process

    machine(Abacus, Loom, broken=True)
    monkeypatch.setattr(process, "_chosen", [])
    shown = CliRunner().invoke(build_app(), ["devices"], env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"}).output
    assert max(map(len, shown.splitlines())) <= 100
    assert "…" not in shown
    for words in ("the warp is torn; mend it", "Written, not run on", "Board 1", "falls back:", "auto picks it"):
        assert words in shown
    for field in dataclasses.fields(PlatformOps):
        assert f"\n {field.name} " in shown
    assert "operations, 1 by fallback" in shown
