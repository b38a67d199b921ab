"""What a hardware config takes: one spelling of names, whatever it was written in."""

from __future__ import annotations

import pytest

from polyrec.core.config import make_settings
from polyrec.core.errors import ConfigError
from polyrec.hardware import HardwareConfig


def config(**values) -> HardwareConfig:
    return make_settings(HardwareConfig, values, where="the test")


@pytest.mark.parametrize("field", ["extra_ops", "extra_att"])
@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("a", ("a",)),
        ("a,b", ("a", "b")),
        ("b, a", ("b", "a")),
        ("a,,b,", ("a", "b")),
        ("", ()),
        (" , ", ()),
        ("a,b,a", ("a", "b")),
        (["a", "b"], ("a", "b")),
        (["a,b", " c "], ("a", "b", "c")),
        (("a", "a"), ("a",)),
        ([""], ()),
        ("ünï-名", ("ünï-名",)),
    ],
)
def test_names_of_plugins(field, written, names):
    assert getattr(config(**{field: written}), field) == names


@pytest.mark.parametrize("written", [None, 3, [3], b"a", [["a"]]])
def test_what_are_no_names_of_plugins(written):
    with pytest.raises(ConfigError, match="extra_ops"):
        config(extra_ops=written)


@pytest.mark.parametrize(
    ("written", "pins"),
    [
        ("norm.rms_norm=a", {"norm.rms_norm": "a"}),
        ("kv.write=a,, norm.rms_norm = b ", {"kv.write": "a", "norm.rms_norm": "b"}),
        (["kv.write=a", "kv.write=a"], {"kv.write": "a"}),
        ({"kv.write": "a"}, {"kv.write": "a"}),
        ({" kv.write": "a "}, {"kv.write": "a"}),
        ("", {}),
        ([], {}),
    ],
)
def test_pins(written, pins):
    assert config(op=written).op == pins


@pytest.mark.parametrize(
    "written", ["kv.write", "kv.write=", "=a", [" "], {"kv.write": ""}, {"": "a"}, {"kv.write": 1}]
)
def test_what_are_no_pins(written):
    with pytest.raises(ConfigError, match=r"\bop\b"):
        config(op=written)


def test_two_plugins_for_one_pin():
    with pytest.raises(ConfigError, match="'a' and to 'b'"):
        config(op="kv.write=a,kv.write=b")
