"""Makes helper modules beside these tests importable; attention on a stand-in for FlashInfer."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # helper modules beside these tests

from flashinfer_stand_in import Event, Paged, Ragged, Wrapper

from polyrec.hardware import HardwareConfig, build_hardware_backend


@pytest.fixture
def log(monkeypatch):
    """What the stand-ins were asked for, in order."""
    log: list = []
    monkeypatch.setattr(Wrapper, "log", log, raising=False)
    monkeypatch.setattr(Event, "log", log, raising=False)
    return log


@pytest.fixture
def module(monkeypatch, log):
    """`polyrec.attention.flashinfer` on the stand-in."""
    library = SimpleNamespace(
        BatchPrefillWithRaggedKVCacheWrapper=Ragged,
        BatchPrefillWithPagedKVCacheWrapper=Paged,
        utils=SimpleNamespace(is_sm90a_supported=lambda device: True),
        __version__="0",
    )
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    names = ("polyrec.attention.flashinfer", "polyrec.attention.flashinfer_slots")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch, "Event", Event)
    module = importlib.import_module("polyrec.attention.flashinfer")
    monkeypatch.setattr(module.FlashInferAttention, "device", "cpu")
    yield module
    for name in names:
        sys.modules.pop(name)


@pytest.fixture
def hardware():
    return build_hardware_backend(HardwareConfig(hardware_platform="cpu"))


@pytest.fixture
def nvidia():
    return build_hardware_backend(HardwareConfig(hardware_platform="nvidia", attention="flashinfer"))
