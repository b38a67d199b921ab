"""The shipped conformance suite passes for what ships."""

from __future__ import annotations

from polyrec.testing.conformance import AttentionConformance, OpsConformance, PlatformConformance


class TestCpu(PlatformConformance):
    platform = "cpu"


class TestCpuOps(OpsConformance):
    platform = "cpu"


class TestSdpa(AttentionConformance):
    attention = "sdpa"
