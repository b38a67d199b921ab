"""Built-in platforms start under `--fallback strict`: what is torch's own is no fallback. Ascend's test is in its folder."""

from __future__ import annotations

import pytest
from stand_in import device_module

from polyrec.hardware import platform_names
from polyrec.hardware.backends.cpu.runtime import CpuRuntime
from polyrec.hardware.backends.musa import MusaBackend
from polyrec.hardware.backends.musa.runtime import MusaRuntime
from polyrec.hardware.base.backend import Capabilities
from polyrec.hardware.choose import platform_class
from polyrec.hardware.table import resolve


def platform_ops(name, fp8):
    """The operations that a platform has on a device with or without fp8; no device is touched."""
    cls = platform_class(name)
    if cls is MusaBackend:  # torch has no "musa" without torch_musa
        return MusaBackend(runtime=MusaRuntime(device_module(), "privateuseone")).ops
    return cls(runtime=CpuRuntime(), capabilities=Capabilities(fp8=fp8)).ops


@pytest.mark.parametrize("purpose", ["infer", "train"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", [name for name in platform_names() if name != "ascend"])
def test_a_platform_starts_without_a_fallback(name, fp8, purpose):
    rows = resolve(platform_class(name), platform_ops(name, fp8), {}, "strict", purpose).rows
    assert [row.field for row in rows if row.fallback or row.origin == "absent"] == []
