"""The shipped suite, on the Ascend platform with the stand-in: built by the registry's path, driven through the engine."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from polyrec.engine.recommender import Recommender
from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.hardware.backends import ascend
from polyrec.hardware.backends.ascend.runtime import AscendRuntime
from polyrec.hardware.base.probe import Probe
from polyrec.models.checkpoint import load_model
from polyrec.testing.conformance import AttentionConformance, PlatformConformance
from polyrec.testing.tiny import write_tiny_model

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recommendations_through_the_fused_kernel_are_as_good_as_the_cpus(library, tmp_path, monkeypatch, dtype):
    """A model that the kernel takes (16 bits, heads of 16), from prompt to items, each judged by the same model in fp32."""
    folder = write_tiny_model(tmp_path / "model", num_items=60, codebook_sizes=(8, 8, 8), hidden_size=64)

    def scores(platform, model_dtype):
        monkeypatch.setattr(f"{Recommender.__module__}.load_model", functools.partial(load_model, dtype=model_dtype))
        backend = build_hardware_backend(HardwareConfig(hardware_platform=platform))
        recommender = Recommender.from_pretrained(folder, backend=backend)
        answer = recommender.recommend([f"item-{number}" for number in range(6)], n=60, beam_width=512)
        found = {item.item_id: item.score for item in answer.items}
        return np.array([found[f"item-{number}"] for number in range(60)])

    exact, cpu, ascend = scores("cpu", torch.float32), scores("cpu", dtype), scores("ascend", dtype)
    assert "npu_fused_infer_attention_score" in library.names()
    rounding = np.sqrt(np.mean((cpu - exact) ** 2))
    assert 0 < rounding < exact.std() / 10
    assert np.sqrt(np.mean((ascend - exact) ** 2)) < 2 * rounding
