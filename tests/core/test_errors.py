"""Errors keep what they say across a process boundary."""

from __future__ import annotations

import pickle

import pytest

from polyrec.core.errors import HardwareError, PolyrecError, RequestError
from polyrec.core.registry import RegistryError
from polyrec.hardware.plugin.source import PluginError, PluginSource

SOURCE = PluginSource("fast", "fast-dist", "1.2.3", "att")


@pytest.mark.parametrize(
    "error",
    [
        PolyrecError("a_code", "Something is 3 and not 4.", "Do this."),
        HardwareError("a_code", "Something."),
        RegistryError("a_code", "Something.", "Do this."),
        RequestError("a_code", "Something.", status=429),
        PluginError("a_code", SOURCE, "is not right.", "Do this."),
    ],
)
def test_an_error_survives_pickling(error):
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert vars(found) == vars(error)
    assert str(found) == str(error)
    assert found.args == error.args
