"""Which attention a model gets: by name, from a plugin, or the platform's first that supports it; what is told otherwise."""

from __future__ import annotations

import logging

import pytest
import torch

from polyrec.attention.sdpa import SdpaAttention
from polyrec.core.errors import PolyrecError
from polyrec.hardware.attention_choice import AttentionChoice, PluginAttention
from polyrec.hardware.base import registry
from polyrec.hardware.base.attention import AttentionNeeds, AttentionSupport
from polyrec.hardware.base.registry import register_attention
from polyrec.hardware.ops import REFERENCE_OPS

NEEDS = AttentionNeeds(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)


def attention(**support):
    return type("Limited", (SdpaAttention,), {"support": AttentionSupport(**support)})


def choice(asked="auto", **plugins):
    own = {name: PluginAttention(cls, f"{name} (a-distribution 1.0)") for name, cls in plugins.items()}
    return AttentionChoice(asked, "cpu", ("sdpa",), own)


def refused(call, code):
    with pytest.raises(PolyrecError) as caught:
        call()
    assert caught.value.code == code
    return str(caught.value)


@pytest.mark.parametrize(
    ("support", "needs", "lacking"),
    [
        ({"head_dims": (64, 128)}, {}, ["head size 16"]),
        ({"head_dims": (16,)}, {}, []),
        ({"dtypes": (torch.bfloat16,)}, {}, ["dtype torch.float32"]),
        ({"platforms": ("elsewhere",)}, {}, ["platform cpu"]),
        ({}, {"sliding_window": 8}, ["a sliding window of 8"]),
        ({}, {"soft_cap": 30.0}, ["a soft cap of 30.0"]),
        ({}, {"mla": True}, ["latent attention (MLA)"]),
        ({}, {"train": True}, ["gradients"]),
        ({"train": True, "mla": True, "soft_cap": True, "sliding_window": True}, {"train": True, "mla": True}, []),
        ({}, {"train": True, "sliding_window": 2}, ["a sliding window of 2", "gradients"]),
    ],
)
def test_what_a_backend_lacks(support, needs, lacking):
    asked = AttentionNeeds(1, 2, 1, 16, **needs)
    assert AttentionSupport(**support).lacks(asked, "cpu") == lacking


def test_the_platforms_first_is_taken_without_a_word(caplog):
    assert choice().select(NEEDS) == "sdpa"
    assert isinstance(choice().build(NEEDS, REFERENCE_OPS), SdpaAttention)
    assert caplog.records == []


def test_auto_takes_the_one_plugin_that_was_loaded():
    own = attention()
    built = choice(own=own).build(NEEDS, REFERENCE_OPS)
    assert type(built) is own
    assert built.needs == NEEDS
    assert built.ops is REFERENCE_OPS


def test_auto_passes_over_a_plugin_that_does_not_support_the_model_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, "polyrec.hardware"):
        assert choice(own=attention(head_dims=(64,))).select(NEEDS) == "sdpa"
    (record,) = caplog.records
    text = record.getMessage()
    assert all(part in text for part in ("[attention_passed_over]", "'own'", "head size 16", "'sdpa'"))


def test_a_name_is_obeyed():
    assert choice("sdpa", own=attention()).select(NEEDS) == "sdpa"
    assert choice("own", own=attention(), other=attention()).select(NEEDS) == "own"


def test_auto_passes_over_what_needs_a_package_that_is_not_installed_and_a_name_is_refused(
    monkeypatch, tmp_path, caplog
):
    (tmp_path / "polyrec_test_needy.py").write_text("import polyrec_test_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry._ATTENTION, "_paths", dict(registry._ATTENTION._paths))
    register_attention("needy", "polyrec_test_needy:Needy")
    first = AttentionChoice("auto", "cpu", ("needy", "sdpa"), {})
    assert first.select(NEEDS) == "sdpa"
    assert caplog.records == []
    alone = AttentionChoice("auto", "cpu", ("needy",), {})
    assert "without the package 'polyrec_test_not_installed'" in refused(
        lambda: alone.select(NEEDS), "attention_unsupported"
    )
    named = AttentionChoice("needy", "cpu", ("needy", "sdpa"), {})
    assert "polyrec_test_not_installed" in refused(lambda: named.select(NEEDS), "attention_import_failed")


def test_auto_does_not_pass_over_what_fails_to_import_otherwise(monkeypatch, tmp_path):
    (tmp_path / "polyrec_test_broken.py").write_text("raise OSError('a library of another version')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry._ATTENTION, "_paths", dict(registry._ATTENTION._paths))
    register_attention("broken", "polyrec_test_broken:Broken")
    first = AttentionChoice("auto", "cpu", ("broken", "sdpa"), {})
    assert "of another version" in refused(lambda: first.select(NEEDS), "attention_import_failed")


def test_two_plugins_need_a_name():
    ambiguous = choice(one=attention(), two=attention())
    text = refused(ambiguous.check, "attention_ambiguous")
    assert "one, two" in text
    assert "--attention one" in text
    choice("two", one=attention(), two=attention()).check()


def test_an_unknown_name_gets_the_closest_and_the_flag():
    text = refused(choice("spda", own=attention()).check, "attention_unknown")
    assert all(part in text for part in ("'spda'", "Did you mean 'sdpa'?", "own", "--extra-att"))


def test_what_was_named_and_cannot_is_refused_naming_one_that_can():
    asked = choice("own", own=attention(head_dims=(64,)))
    text = refused(lambda: asked.build(NEEDS, REFERENCE_OPS), "attention_unsupported")
    assert "'own' does not support head size 16" in text
    assert "--attention sdpa" in text


def test_what_nobody_can_is_refused_with_every_reason():
    latent = AttentionNeeds(1, 2, 1, 16, mla=True)
    text = refused(lambda: choice(own=attention()).select(latent), "attention_unsupported")
    assert "'own' does not support latent attention" in text
    assert "'sdpa' does not support latent attention" in text
    assert "--extra-att" in text


def test_a_class_of_another_kind_is_refused():
    text = refused(lambda: choice("own", own=dict).load("own"), "attention_not_a_backend")
    assert "'own'" in text
    assert "dict" in text


def test_a_registered_backend_that_does_not_import_stops_no_other(monkeypatch):
    monkeypatch.setattr(registry._ATTENTION, "_paths", dict(registry._ATTENTION._paths))
    register_attention("broken", "polyrec.attention.no_such_module:Nothing")
    assert "broken" in choice().names()
    assert choice().select(NEEDS) == "sdpa"
    text = refused(lambda: choice("own", own=attention(head_dims=(64,))).select(NEEDS), "attention_unsupported")
    assert "--attention sdpa" in text
    text = refused(lambda: choice("broken").build(NEEDS, REFERENCE_OPS), "attention_import_failed")
    assert "no_such_module" in text
