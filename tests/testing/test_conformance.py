"""The shipped conformance suite passes for what ships, and for a platform whose graphs really record."""

from __future__ import annotations

import pytest

from polyrec.core.registry import Registry
from polyrec.hardware.base import registry
from polyrec.testing.conformance import AttentionConformance, OpsConformance, PlatformConformance


@pytest.fixture
def toy(monkeypatch):
    """The toy accelerator, beside the CPU."""
    platforms = Registry("platform", {"cpu": registry.platform_path("cpu"), "toy": "toy_platform:ToyBackend"})
    monkeypatch.setattr(registry, "_PLATFORMS", platforms)


class TestCpu(PlatformConformance):
    platform = "cpu"


class TestCpuOps(OpsConformance):
    platform = "cpu"


class TestCpuOpsInTraining(OpsConformance):
    platform = "cpu"
    purpose = "train"


class TestSdpa(AttentionConformance):
    attention = "sdpa"


@pytest.mark.usefixtures("toy")
class TestToy(PlatformConformance):
    platform = "toy"


@pytest.mark.usefixtures("toy")
class TestToyOps(OpsConformance):
    platform = "toy"
