"""Attention backends by name: each fault of a registered path has its code. The registry's own tests are in core."""

from __future__ import annotations

import pytest

from polyrec.core.registry import Registry, RegistryError
from polyrec.hardware.base import registry


@pytest.fixture
def names(monkeypatch):
    """A registry that this test may fill."""
    monkeypatch.setattr(registry, "_ATTENTION", Registry("attention"))


def refused(code, call, *arguments):
    with pytest.raises(RegistryError) as caught:
        call(*arguments)
    assert caught.value.code == code
    assert caught.value.remedy
    return str(caught.value)


def test_each_fault_of_a_path_has_its_code(names):
    registry.register_attention("good", "fractions:Fraction")
    registry.register_attention("hollow", "fractions:NoSuchAttention")
    registry.register_attention("gone", "polyrec_test_not_installed:Attention")
    assert "'flash' is registered as 'flash.py'" in refused(
        "attention_path_invalid", registry.register_attention, "flash", "flash.py"
    )
    assert "decimal:Decimal" in refused("attention_taken", registry.register_attention, "good", "decimal:Decimal")
    assert "Did you mean 'good'?" in refused("attention_unknown", registry.load_attention, "god")
    assert "NoSuchAttention" in refused("attention_attribute_missing", registry.load_attention, "hollow")
    assert "polyrec_test_not_installed" in refused("attention_import_failed", registry.load_attention, "gone")
    assert registry.load_attention("good").__name__ == "Fraction"
