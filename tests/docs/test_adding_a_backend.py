"""docs/adding-a-backend.md, followed literally in an empty folder: both platforms are listed, one passes the whole suite."""

from __future__ import annotations

import json
import re

import pytest

from polyrec.testing.tiny import write_tiny_model

from .blocks import DOCS, blocks_of, follow, run_python

PAGE = (DOCS / "adding-a-backend.md").read_text(encoding="utf-8")
TWO = {"SLATE_DEVICES": "2"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The two distributions' folders, written as the page says."""
    folder = tmp_path_factory.mktemp("vendors")
    assert len(follow(PAGE, folder)) == 13
    return folder


def python(built, *arguments: str, **variables: str) -> str:
    return run_python(list(arguments), built / "polyrec-acme", built / "polyrec-slate", cwd=built, variables=variables)


def report(built, *arguments: str, **variables: str):
    return json.loads(python(built, "-m", *arguments, "--json", **variables))


def listed(report, name: str):
    return next(platform for platform in report["platforms"] if platform["name"] == name)


def test_the_smallest_platform_is_listed_with_its_own_reason(built):
    found = listed(report(built, "polyrec_acme", "devices", "--hardware-platform", "cpu"), "acme")
    assert found["state"] == "absent"
    assert "/dev/acme0" in found["reason"]
    assert found["remark"] == "Written, not run on this hardware."


def test_the_smallest_platform_is_made_of_the_cuda_like_parts(built):
    text = """
import polyrec_acme
from polyrec.hardware.backends.cuda_like import CudaLikeGraph, CudaLikeRuntime
from polyrec.hardware.choose import platform_class
from polyrec.hardware.table import resolve
cls = platform_class("acme")
backend = cls()
table = resolve(cls, backend.ops, {}, "strict", "infer")
origins = {(row.origin, row.source) for row in table.rows}
print(type(backend.runtime) is CudaLikeRuntime, type(backend.graph) is CudaLikeGraph, backend.device_type)
print(sorted(origins))
"""
    parts, origins = python(built, "-c", text).splitlines()
    assert parts.split() == ["True", "True", "cuda"]
    assert origins == "[('inherited', 'cuda_like'), ('reference', '')]"


def test_the_suite_skips_a_platform_that_is_not_here_with_its_reason(built):
    (built / "test_acme.py").write_text(
        "import polyrec_acme\nfrom polyrec.testing.conformance import PlatformConformance\n"
        "class TestAcme(PlatformConformance):\n    platform = 'acme'\n"
    )
    out = python(built, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "test_acme.py")
    assert "passed" not in out
    assert "platform 'acme' is absent" in out


@pytest.mark.parametrize(
    ("devices", "state"), [({}, "absent"), ({"SLATE_DEVICES": "none"}, "failed"), (TWO, "usable")], ids=str
)
def test_the_probe_tells_absent_from_failed(built, devices, state):
    found = report(built, "polyrec_slate", "devices", "--hardware-platform", "cpu", **devices)
    assert listed(found, "slate")["state"] == state


def test_auto_takes_it_and_never_silently_the_cpu(built):
    assert report(built, "polyrec_slate", "devices", **TWO)["chosen"]["platform"] == "slate"
    broken = report(built, "polyrec_slate", "devices", SLATE_DEVICES="none")
    assert (broken["chosen"], broken["error"]["code"]) == (None, "probe_failed")
    assert report(built, "polyrec_slate", "devices")["chosen"]["platform"] == "cpu"


def test_a_device_that_is_not_there_is_refused(built):
    with pytest.raises(AssertionError, match="ended with 2") as caught:
        report(built, "polyrec_slate", "devices", "--device", "slate:2", **TWO)
    assert "device_index" in str(caught.value)


def test_its_operations_are_own_inherited_decomposed_and_absent(built):
    found = report(built, "polyrec_slate", "devices", "--device", "slate:1", **TWO)["chosen"]
    origins = {row["field"]: row["origin"] for row in found["ops"]}
    assert origins["norm.rms_norm"] == origins["act.silu_and_mul"] == "built-in"
    assert origins["search.beam_step"] == "inherited"
    assert origins["rope.rotary"] == origins["linear.mm"] == "reference"
    assert origins["norm.add_rms_norm"] == "decomposed"
    assert origins["linear.scaled_mm"] == origins["norm.rms_norm_fp8"] == "absent"
    assert found["attention"]["picked"] == "slate"


def test_it_passes_the_conformance_suite(built):
    words = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "polyrec-slate/tests")
    out = python(built, *words, **TWO)
    passed = re.search(r"(\d+) passed", out)
    assert passed, out
    assert int(passed.group(1)) > 80, out
    # Only what the platform does not claim may be skipped: fp16, soft caps, and the operations that it leaves out.
    reasons = [line for line in out.splitlines() if line.startswith("SKIPPED")]
    allowed = re.compile(r"has no '(\w+\.\w*fp8\w*|linear\.\w+|act\.gelu_and_mul|moe\.experts)'|float16|soft cap")
    assert [line for line in reasons if not allowed.search(line)] == []


def test_the_suite_fails_when_a_kernel_is_wrong(built, tmp_path):
    """So that passing it says something: the same platform with another epsilon."""
    follow(PAGE, tmp_path)
    path = tmp_path / "polyrec-slate" / "polyrec_slate" / "ops.py"
    path.write_text(path.read_text().replace("keepdim=True) + eps", "keepdim=True) + 0.1 + eps"))
    with pytest.raises(AssertionError, match=r"norm\.rms_norm"):
        run_python(
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "-k", "TestOps and norm.rms_norm"],
            tmp_path / "polyrec-slate",
            cwd=tmp_path / "polyrec-slate",
            variables=TWO,
        )


def test_the_engine_recommends_on_it(built):
    model = write_tiny_model(built / "model", num_items=40)
    words = ("recommend", str(model), "--history", "item-1", "--json")
    slate = python(built, "-m", "polyrec_slate", *words, "--device", "slate:1", **TWO)
    cpu = python(built, "-m", "polyrec_slate", *words, "--hardware-platform", "cpu")
    assert [item["item_id"] for item in json.loads(slate)["items"]] == [
        item["item_id"] for item in json.loads(cpu)["items"]
    ]


def test_blocks_that_are_not_files_are_commands():
    shown = [block for block in blocks_of(PAGE) if not block.above.startswith("New file `")]
    assert {block.language for block in shown} == {"bash"}
