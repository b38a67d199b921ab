"""Which devices start kernels early."""

from __future__ import annotations

import pytest
import torch

early_launch = pytest.importorskip("polyrec.hardware.early_launch", reason="needs Triton")

ON = {"EARLY": True, "launch_pdl": True}


@pytest.mark.parametrize(
    ("kind", "build", "capability", "expected"),
    [
        ("cuda", "cuda", (9, 0), ON),
        ("cuda", "cuda", (10, 3), ON),
        ("cuda", "cuda", (8, 9), {"EARLY": False}),
        ("cuda", "hip", (9, 4), {"EARLY": False}),
        ("cuda", "maca", (9, 0), {"EARLY": False}),
        ("cpu", "cuda", (9, 0), {"EARLY": False}),
    ],
)
def test_hopper_and_later_of_nvidia_alone(monkeypatch, kind, build, capability, expected):
    monkeypatch.setattr(early_launch, "ENABLED", True)
    monkeypatch.setattr(early_launch, "build_of", lambda module: build)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert early_launch.early.__wrapped__(torch.device(kind)) == expected
    monkeypatch.setattr(early_launch, "ENABLED", False)
    assert early_launch.early.__wrapped__(torch.device(kind)) == {"EARLY": False}
