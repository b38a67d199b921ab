"""Builds hardware with plugins as a process would, without choosing it for this one; and one way to expect a refusal."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from polyrec.core.config import make_settings
from polyrec.core.errors import HardwareError
from polyrec.hardware import HardwareBackend, HardwareConfig, build_hardware_backend


def build(**settings: Any) -> HardwareBackend:
    """The CPU unless another platform is named."""
    importlib.invalidate_caches()
    return build_hardware_backend(make_settings(HardwareConfig, {"hardware_platform": "cpu", **settings}))


def refused(code: str, *words: str, **settings: Any) -> HardwareError:
    """The error of a build: its code, a remedy, and these words in its text."""
    with pytest.raises(HardwareError) as caught:
        build(**settings)
    error = caught.value
    assert error.code == code, error
    assert error.remedy
    text = str(error)
    for word in words:
        assert word in text, text
    return error
