"""The suite that every plugin must pass, on the two of this distribution. Set `platform` to test on another than the CPU."""

from __future__ import annotations

from polyrec.hardware import HardwareConfig, build_hardware_backend
from polyrec.testing.conformance import AttentionConformance, OpsConformance


class TestOps(OpsConformance):
    """Values, gradients, views and capture, in every claimed dtype."""

    extra_ops = ("example_ops",)
    fields = ("norm.rms_norm",)


class TestAttention(AttentionConformance):
    """Everything that the backend claims, and recommendations with it."""

    extra_att = ("example_att",)
    attention = "example"


def test_what_was_tested_is_this_plugin() -> None:
    backend = build_hardware_backend(HardwareConfig(extra_ops=("example_ops",), extra_att=("example_att",)))
    assert backend.table.row("norm.rms_norm").implementation == "polyrec_example_plugin.ops:rms_norm"
    assert backend.attention.load("example").__module__ == "polyrec_example_plugin.attention"
