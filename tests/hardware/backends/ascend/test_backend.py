"""The backend as the registry builds it: torch_npu is imported late, and only here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import pytest
import torch

from polyrec.core.errors import HardwareError
from polyrec.hardware.backends.ascend import AscendBackend
from polyrec.hardware.backends.ascend.graph import AscendGraph
from polyrec.hardware.backends.ascend.library import load_library
from polyrec.hardware.backends.ascend.runtime import AscendRuntime
from polyrec.hardware.base.registry import load_attention, load_platform
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.hardware.table import resolve

from .standin import Library


def run(program):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_registry_knows_the_platform_and_its_attention():
    assert load_platform("ascend") is AscendBackend
    assert (AscendBackend.platform_name, AscendBackend.device_type) == ("ascend", "npu")
    assert AscendBackend.remark == "Written, not run on this hardware."
    assert [load_attention(name).__name__ for name in AscendBackend.attention_order] == [
        "AscendAttention",
        "SdpaAttention",
    ]


def test_importing_the_platform_imports_no_torch_npu():
    found = run(
        """
        import json, sys
        sys.modules["torch_npu"] = None  # importing it would raise
        from polyrec.hardware.base.registry import load_attention, load_platform
        platform = load_platform("ascend")
        load_attention("ascend")
        from polyrec.core.errors import HardwareError
        try:
            platform()
        except HardwareError as error:
            print(json.dumps([error.code, str(error)]))
        """
    )
    assert found[0] == "ascend_library_missing"
    assert "torch_npu" in found[1]


def test_parts_are_composed():
    library = Library()
    parts = {"runtime": AscendRuntime(library, "cpu"), "graph": AscendGraph(library, 1), "ops": REFERENCE_OPS}
    backend = AscendBackend(library, **parts)
    assert (backend.runtime, backend.graph, backend.ops) == tuple(parts.values())
    assert backend.capabilities.captures
    assert not backend.capabilities.fp8
    assert torch.bfloat16 in backend.capabilities.dtypes


def test_building_with_the_stand_in_opens_no_device(monkeypatch):
    library = Library()
    monkeypatch.setattr("polyrec.hardware.backends.ascend.AscendRuntime", lambda library: AscendRuntime(library, "cpu"))
    backend = AscendBackend(library)
    assert library.calls == []
    assert isinstance(backend.graph, AscendGraph)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModuleNotFoundError("No module named 'torch_npu'", name="torch_npu"), "ascend_library_missing"),
        (ModuleNotFoundError("No module named 'attr'", name="attr"), "ascend_import_failed"),
        (ImportError("libascendcl.so: cannot open shared object file"), "ascend_import_failed"),
        (RuntimeError("Two accelerators cannot be used at the same time"), "ascend_import_failed"),
    ],
)
def test_a_failed_import_keeps_its_cause(error, code):
    def load(name):
        raise error

    with pytest.raises(HardwareError) as caught:
        load_library(load)
    assert caught.value.code == code
    assert caught.value.__cause__ is error
    assert caught.value.remedy


def test_it_serves_without_a_fallback_and_trains_with_those_that_strict_names(monkeypatch):
    monkeypatch.setattr("polyrec.hardware.backends.ascend.AscendRuntime", lambda library: AscendRuntime(library, "cpu"))
    ops = AscendBackend(Library()).ops
    assert not any(row.fallback for row in resolve(AscendBackend, ops, {}, "strict", "infer").rows)
    fallbacks = {row.field for row in resolve(AscendBackend, ops, {}, "warn", "train").rows if row.fallback}
    with pytest.raises(HardwareError) as caught:
        resolve(AscendBackend, ops, {}, "strict", "train")
    assert caught.value.code == "op_missing"
    assert fallbacks
    assert fallbacks == set(re.findall(r"(\S+) \(would fall back", caught.value.message))
