"""The shipped suite, on the Ascend platform with the stand-in: built by the registry's path, driven through the engine."""

from __future__ import annotations

import pytest
import torch

from polyrec.hardware.backends import ascend
from polyrec.hardware.backends.ascend.runtime import AscendRuntime
from polyrec.hardware.base.probe import Probe
from polyrec.testing.conformance import AttentionConformance, PlatformConformance

from .standin import Library


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """torch_npu is the stand-in, its devices are the host's memory, and its probe finds them."""
    library = Library()
    monkeypatch.setattr(ascend, "load_library", lambda: library)
    monkeypatch.setattr("polyrec.hardware.backends.ascend.attention.load_library", lambda: library)
    monkeypatch.setattr(ascend, "AscendRuntime", lambda library: AscendRuntime(library, "cpu"))
    devices = tuple(library.npu.get_device_name(index) for index in range(library.npu.device_count()))
    monkeypatch.setattr(ascend.AscendBackend, "probe", classmethod(lambda cls: Probe.usable(devices)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    return library


class TestAscendPlatform(PlatformConformance):
    platform = "ascend"

    def test_the_engine_calls_torch_npus_kernels(self, hardware, library):
        from polyrec.testing.platform_checks import check_engine

        check_engine(hardware)
        assert {"npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_scatter_pa_kv_cache"} <= set(library.names())


class TestAscendAttention(AttentionConformance):
    platform = "ascend"
    attention = "ascend"
