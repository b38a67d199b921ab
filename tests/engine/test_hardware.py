"""The engine's hardware: chosen before a folder is read, graphs used where they only call, attention as it was chosen."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from polyrec.attention.sdpa import SdpaAttention
from polyrec.core.errors import ConfigError, HardwareError
from polyrec.engine import recommender as recommender_module
from polyrec.engine import runner as runner_module
from polyrec.engine.recommender import Recommender
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.attention_choice import PluginAttention
from polyrec.hardware.base.attention import AttentionSupport
from polyrec.hardware.base.backend import Capabilities
from polyrec.hardware.base.graph import CapturedGraph, Graph
from polyrec.testing.tiny import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("hardware") / "tiny", num_items=30, codebook_sizes=(4, 4, 4))


@pytest.fixture
def backend():
    return build_hardware_backend(HardwareConfig(hardware_platform="cpu"))


def ask(recommender):
    return recommender.recommend(["item-1", "item-2"], n=5)


FLAGS = {
    "device": "cpu",
    "hardware_platform": "cpu",
    "extra_ops": "one,two",
    "extra_att": ["three"],
    "op": {"norm.rms_norm": "one"},
    "attention": "sdpa",
    "fallback": "strict",
    "verify_plugins": "full",
    "allow_cpu": True,
}


@pytest.mark.parametrize("names", [[name] for name in FLAGS] + [list(FLAGS)], ids=lambda names: "+".join(names)[:20])
def test_flags_reach_the_hardware(folder, backend, monkeypatch, names):
    given = {name: FLAGS[name] for name in names}
    asked = []
    monkeypatch.setattr(recommender_module, "get_hardware_backend", lambda config: asked.append(config) or backend)
    Recommender.from_pretrained(folder, **given)
    assert asked == [HardwareConfig(**given)]


def test_every_flag_of_the_hardware_is_taken():
    assert set(FLAGS) == set(HardwareConfig.model_fields) - {"purpose", "gpu"}  # device="cuda:1" says it in Python


def test_without_flags_the_process_keeps_its_hardware(folder, backend, monkeypatch):
    asked = []
    monkeypatch.setattr(recommender_module, "get_hardware_backend", lambda config: asked.append(config) or backend)
    Recommender.from_pretrained(folder)
    assert asked == [None]


@pytest.mark.parametrize("name", FLAGS)
def test_a_backend_excludes_flags(folder, backend, name):
    with pytest.raises(ConfigError, match=f"'cpu'.*{name}") as caught:
        Recommender.from_pretrained(folder, backend=backend, **{name: FLAGS[name]})
    assert caught.value.code == "backend_given_twice"


def test_a_wrong_flag_is_told_before_the_folder(tmp_path):
    with pytest.raises(ConfigError, match="fallback") as caught:
        Recommender.from_pretrained(tmp_path / "nothing", fallback="never")
    assert caught.value.code == "config_invalid"


def test_the_hardware_is_built_before_the_folder_is_read(tmp_path):
    """In a process that has no hardware yet, so that another choice is not what is refused."""
    code = f"""
import json
from polyrec.core.errors import PolyrecError
from polyrec.engine.recommender import Recommender
codes = []
for flags in ({{"hardware_platform": "nowhere"}}, {{"extra_ops": "nothing"}}, {{"attention": "spda"}}, {{"device": "cpu"}}):
    try:
        Recommender.from_pretrained({str(tmp_path / "missing")!r}, **flags)
    except PolyrecError as error:
        codes.append(error.code)
print(json.dumps(codes))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    *hardware, of_folder = json.loads(done.stdout)
    assert hardware == ["platform_unknown", "plugin_unknown", "attention_unknown"]
    assert of_folder not in hardware, "the device is there, so the missing folder is next"


class NotedGraph(CapturedGraph):
    def __init__(self, function, notes):
        self._function = function
        self._notes = notes

    def update(self, states):
        self._notes.append(("update", states["lengths"].tolist()))

    def replay(self):
        self._notes.append(("replay", None))
        return self._function()

    def close(self):
        pass


class NotedGraphs(Graph):
    """Notes what is asked of its graphs."""

    def __init__(self, notes):
        self.notes = notes

    def new_pool(self):
        return None

    def budget(self):
        return None

    def capture(self, function, pool=None):
        self.notes.append(("capture", None))
        return NotedGraph(function, self.notes)


def noted_attention(notes):
    class NotedAttention(SdpaAttention):
        def refresh(self, states):
            notes.append(("refresh", states["lengths"].tolist()))

    return NotedAttention


def choose(backend, cls):
    """As if a plugin had registered the attention."""
    own = {"own": PluginAttention(cls, "own (a test 1.0)")}
    backend.attention = dataclasses.replace(backend.attention, plugins=own)


def test_lengths_are_told_before_each_replay(folder, backend):
    notes = []
    backend.graph = NotedGraphs(notes)
    choose(backend, noted_attention(notes))
    recommender = Recommender.from_pretrained(folder, backend=backend)
    assert notes == [("capture", None)]
    for _ in range(2):
        notes.clear()
        assert len(ask(recommender).items) == 5
        (told, lengths), *rest = notes
        assert told == "refresh"
        assert rest == [("update", lengths), ("replay", None)]


def test_where_graphs_record_the_search_is_called(folder, backend):
    expected = ask(Recommender.from_pretrained(folder, backend=backend))
    notes = []
    backend.graph = NotedGraphs(notes)
    backend.capabilities = Capabilities(captures=True)
    assert ask(Recommender.from_pretrained(folder, backend=backend)) == expected
    assert notes == []


def test_plugins_are_asked_about_once_after_the_first_batch(folder, backend, monkeypatch):
    asked = []
    monkeypatch.setattr(runner_module, "report_never_called", asked.append)
    recommender = Recommender.from_pretrained(folder, backend=backend)
    assert asked == []
    for _ in range(3):
        ask(recommender)
    assert asked == [backend]


def test_attention_that_cannot_run_the_model_is_refused_when_the_engine_is_built(folder, backend):
    class OtherHeads(SdpaAttention):
        support = AttentionSupport(head_dims=(64, 128))

    choose(backend, OtherHeads)
    backend.attention = dataclasses.replace(backend.attention, asked="own")
    with pytest.raises(HardwareError, match="head size 8") as caught:
        Recommender.from_pretrained(folder, backend=backend)
    assert caught.value.code == "attention_unsupported"
    assert "--attention sdpa" in caught.value.remedy
