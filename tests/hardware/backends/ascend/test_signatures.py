"""Every function of torch_npu that the platform names exists, and takes what it is given, in each version that was read."""

from __future__ import annotations

import re
import zipfile

import pytest
import yaml

from .published import FIXTURE, PLAIN, RECEIVERS, fault, published, signature, source_uses, uses
from .renew_schemas import SCHEMAS, read, version_of

ASKED = {  # by the issue
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_swiglu",
    "npu_rotary_mul",
    "npu_scatter_pa_kv_cache",
    "npu_fused_infer_attention_score",
    "npu.NPUGraph",
    "npu.graph_task_group_begin",
    "npu.graph_task_group_end",
    "npu.graph_task_update_begin",
    "npu.graph_task_update_end",
}


@pytest.mark.parametrize("version", sorted(published()))
def test_every_use_fits_what_is_published(version):
    faults = [text for use in source_uses() if (text := fault(use, published()[version]))]
    assert faults == []


def test_the_functions_that_were_asked_for_are_used():
    assert {use.name for use in source_uses() if use.called} >= ASKED


def test_the_fixture_holds_what_is_used_and_nothing_else():
    """So that a new use asks for a renewal, and an old one leaves."""
    used = {use.name for use in source_uses()}
    for version, names in published().items():
        assert set(names) == used, version


def test_the_oldest_supported_series_and_a_later_one_were_read():
    assert [version.split(".")[:2] for version in sorted(published(), key=lambda v: [*map(int, v.split("."))])] == [
        ["2", "9"],
        ["2", "14"],
    ]


def test_every_receiver_is_met():
    """A variable that was renamed in the source would otherwise escape the check."""
    methods = {use.name.rsplit(".", 1)[0] for use in source_uses() if use.called}
    assert set(RECEIVERS.values()) <= methods


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("self._library.npu_rms_nrom(x, weight, epsilon=eps)", "no npu_rms_nrom"),
        ("self._library.npu_rms_norm(x, weight, eps=eps)", "unexpected keyword argument 'eps'"),
        ("self._library.npu_rms_norm(self=x, gamma=weight)", "'self'"),
        ("self._library.npu_rms_norm(x)", "missing a required argument: 'gamma'"),
        ("library.npu_swiglu(x, 1, 2)", "too many positional arguments"),
        ("library.npu_scatter_pa_kv_cache(k, v, kc, vc, slots, 'Norm')", "too many positional arguments"),
        ("options = {'num_head': 1}\nlibrary.npu_fused_infer_attention_score(q, k, v, **options)", "num_head"),
        ("library.npu_fused_infer_attention_score.out(q, k, v, outs=[a, b])", "'out'"),
        ("library.npu.ExternalEvents()", "no npu.ExternalEvents"),
        ("library.npu.graph(captured, pools=1)", "pools"),
        ("library.npu.graph_task_update_begin(stream)", "handle"),
        ("task.gate.wait_for(stream)", "no npu.ExternalEvent.wait_for"),
        ("self._passed.synchronize(1)", "too many positional arguments"),
        ("names = library.npu.get_devices", "no npu.get_devices"),
        ("library.profiler.ProfilerActivity.NPU()", "cannot be called"),
    ],
)
def test_a_misspelt_function_or_parameter_is_found(source, words):
    for version, names in published().items():
        found = [text for use in uses(source) if (text := fault(use, names))]
        assert len(found) == 1, version
        assert words in found[0]


def test_right_uses_pass():
    source = (
        "options = {'num_heads': 1, 'scale': 2.0}\n"
        "self._library.npu_fused_infer_attention_score.out(q, k, v, workspace=w, out=[a, b], **options)\n"
        "library.npu_rotary_mul(x, r1, r2, rotary_mode='half')\n"
        "with library.npu.graph(captured, pool=None): pass\n"
        "activity = library.profiler.ProfilerActivity.NPU\n"
    )
    for names in published().values():
        assert [fault(use, names) for use in uses(source)] == [None] * 4


def test_options_that_cannot_be_read_are_refused():
    with pytest.raises(AssertionError, match="literal dict"):
        list(uses("library.npu_rms_norm(x, w, **options())"))
    with pytest.raises(AssertionError, match="literal dict"):
        list(uses("options = {'a': 1}\noptions = {'b': 1}\nlibrary.npu_rms_norm(x, w, **options)"))


def test_a_schema_becomes_a_signature():
    text = (
        'f.out(Tensor self, int[2] size=[1, 2], *, Tensor? mask=None, str mode="a", Tensor(a!) x, Tensor(b!) y) -> ()'
    )
    assert re.sub(r"'", "", str(signature(text))) == '(self, /, size=[1, 2], *, mask=None, mode="a", out)'
    assert str(signature("(stream, *, a: int, b=1, **kwargs)")) == "(stream, *, a, b=None, **kwargs)"


@pytest.fixture
def wheel(tmp_path):
    """A wheel with the folders and forms of torch_npu's."""
    path = tmp_path / "torch_npu-9.8.7-cp311-cp311-linux.whl"
    files = {
        SCHEMAS: (
            "custom:\n  - func: f(Tensor self) -> Tensor\n    op_api: all\n\n-\n"
            "  func: f.out(Tensor self, *, Tensor(a!) out) -> ()\n"
        ),
        "torch_npu/__init__.py": "from torch_npu.version import __version__ as __version__\n",
        "torch_npu/npu/__init__.py": "from .streams import Event\nfrom .mstx import mstx\ndef stop(device=None): ...\n",
        "torch_npu/npu/streams.py": (
            "class Event:\n    def __new__(cls, timing=False): ...\n    def record(self, stream=None): ...\nclass Hidden: ...\n"
        ),
        "torch_npu/npu/mstx.py": "class mstx:\n    @staticmethod\n    def start(message: str): ...\n",
        "torch_npu/profiler/__init__.py": "from torch_npu._C import Activity\n",
        "torch_npu/profiler/used.py": "x = Activity.NPU\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_wheel_is_read(wheel):
    names = [
        "f",
        "f.out",
        "g",
        "__version__",
        "npu.Event",
        "npu.Event.record",
        "npu.Event.rec",
        "npu.Hidden",
        "npu.stop",
    ]
    names += ["npu.mstx.start", "profiler.Activity.NPU", "profiler.Activity.GPU", "other.thing"]
    assert version_of(str(wheel)) == "9.8.7"
    assert read(wheel, names) == {
        "f": "f(Tensor self) -> Tensor",
        "f.out": "f.out(Tensor self, *, Tensor(a!) out) -> ()",
        "__version__": PLAIN,
        "npu.Event": "(timing=False)",
        "npu.Event.record": "(stream=None)",
        "npu.stop": "(device=None)",
        "npu.mstx.start": "(message: str)",
        "profiler.Activity.NPU": PLAIN,
    }


def test_the_fixture_is_yaml_with_a_note():
    text = FIXTURE.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert yaml.safe_load(text) == published()
