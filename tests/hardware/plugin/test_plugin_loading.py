"""Plugins that load: what they change, what they leave, and that a model's forward calls them."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from importlib import import_module, metadata

import pytest
import torch
from plugin_distributions import ATT, OPS, REGISTER, RMS_NORM, unique, write_distribution, write_plugin

from polyrec import plugin_api
from polyrec.hardware.backends.cpu import CpuBackend
from polyrec.hardware.base.attention import AttentionPlan
from polyrec.hardware.choose import Choice
from polyrec.hardware.ops import REFERENCE_OPS
from polyrec.hardware.ops.spec import MISSING
from polyrec.hardware.table import report_never_called
from polyrec.models.qwen3 import Qwen3, read_config
from polyrec.plugin_api import API_VERSION

from .building import build, refused

GOOD = RMS_NORM + REGISTER
TWO = """
import torch
from polyrec.plugin_api import register_att_backend, register_ops
from polyrec.attention.sdpa import SdpaAttention

def silu_and_mul(x, threads=4):
    gate, up = x.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up

register_ops(act={"silu_and_mul": silu_and_mul})

@register_att_backend("own")
class Own(SdpaAttention):
    pass
"""


def rows_without(backend, *fields):
    return [row for row in backend.table.rows if row.field not in fields]


def test_nothing_is_loaded_or_read_unasked(site, monkeypatch):
    write_plugin(site, "fast", "raise RuntimeError('imported')")

    def scanned(*_, **__):
        raise AssertionError("metadata was read")

    monkeypatch.setattr("polyrec.hardware.plugin.common.scan_installed", scanned)
    assert all(row.origin != "plugin" for row in build().table.rows)


def test_the_registered_field_is_replaced_and_all_others_stay(site):
    package = write_plugin(site, "fast", GOOD)
    plain, extended = build(), build(extra_ops="fast")
    row = extended.table.row("norm.rms_norm")
    assert (row.origin, row.source) == ("plugin", "fast (fast-dist 1.2.3)")
    assert row.implementation == f"{package}.work:rms_norm"
    assert rows_without(extended, "norm.rms_norm") == rows_without(plain, "norm.rms_norm")
    assert extended.ops.act == plain.ops.act
    assert extended.table.fingerprint != plain.table.fingerprint


@pytest.mark.parametrize(
    "returned",
    ["WORK", "[WORK]", "(WORK,)", "Plugin(WORK)", "Plugin(modules=[WORK])",
     "Plugin(WORK, ('ascend', 'cpu'), '>=1.0,<2', 'torch>=2')",
     "Plugin(WORK, requires=[\"no-such-thing; python_version < '3'\"])"],
)  # fmt: skip
def test_every_form_of_declaration(site, returned):
    write_plugin(site, "fast", GOOD, returned=returned)
    assert build(extra_ops=["fast"]).table.row("norm.rms_norm").origin == "plugin"


def test_both_groups_of_one_distribution(site):
    package = unique()
    register = f"def ops():\n    return ['{package}.work']\ndef att():\n    return '{package}.work'\n"
    points = {OPS: {"two_ops": f"{package}.register:ops"}, ATT: {"two_att": f"{package}.register:att"}}
    write_distribution(
        site, "two", points, {f"{package}.__init__": "", f"{package}.register": register, f"{package}.work": TWO}
    )
    ops_only = build(extra_ops="two_ops")
    assert ops_only.attention.plugins == {}
    att_only = build(extra_att="two_att")
    assert [name for name, found in att_only.attention.plugins.items() if found.source == "two_att (two 1.2.3)"] == [
        "own"
    ]
    assert att_only.table.row("act.silu_and_mul").origin != "plugin"
    assert build(extra_ops="two_ops", extra_att="two_att", attention="own").attention.candidates() == ["own"]


def test_two_plugins_on_different_fields_need_no_pin(site):
    write_plugin(site, "fast", GOOD)
    write_plugin(site, "other", TWO)
    found = {row.field: row.source for row in build(extra_ops="other,fast,other").table.rows if row.origin == "plugin"}
    assert found == {"norm.rms_norm": "fast (fast-dist 1.2.3)", "act.silu_and_mul": "other (other-dist 1.2.3)"}


def test_what_a_plugin_prints_before_it_is_used_is_not_on_standard_output(site, capsys):
    speaking = GOOD.replace("    wide =", "    print('operation speaks')\n    wide =")
    package = write_plugin(site, "fast", "print('module speaks')\n" + speaking)
    register = site / package / "register.py"
    register.write_text("print('entry speaks')\n" + register.read_text(encoding="utf-8"), encoding="utf-8")
    build(extra_ops="fast")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.split("\n")[:3] == ["entry speaks", "module speaks", "operation speaks"]


def test_the_same_plugin_twice_in_one_process(site):
    write_plugin(site, "fast", GOOD)
    first, second = build(extra_ops="fast"), build(extra_ops="fast")
    assert first.table.fingerprint == second.table.fingerprint
    second.ops.norm.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)
    assert (first.table.calls["norm.rms_norm"].count, second.table.calls["norm.rms_norm"].count) == (0, 1)


def test_a_module_that_was_imported_by_hand_is_found(site):
    package = write_plugin(site, "fast", GOOD)
    import_module(f"{package}.work")
    assert all(row.origin != "plugin" for row in build().table.rows), "a record alone changes nothing"
    assert build(extra_ops="fast").table.row("norm.rms_norm").origin == "plugin"


def test_a_module_that_its_entry_points_module_imports_is_found(site):
    package = write_plugin(site, "fast", GOOD)
    register = site / package / "register.py"
    register.write_text("from . import work\n" + register.read_text(encoding="utf-8"), encoding="utf-8")
    assert build(extra_ops="fast").table.row("norm.rms_norm").origin == "plugin"


def test_registering_through_a_library_counts_for_the_plugin_that_is_loaded(site):
    library = unique("library")
    text = "from polyrec.plugin_api import register_ops\ndef help(f):\n    register_ops(norm={'rms_norm': f})\n"
    (site / f"{library}.py").write_text(text, encoding="utf-8")
    for name in ("fast", "faster"):
        write_plugin(site, name, RMS_NORM + f"import {library}\n{library}.help(rms_norm)\n")
    for name in ("fast", "faster"):
        assert build(extra_ops=name).table.row("norm.rms_norm").source == f"{name} ({name}-dist 1.2.3)"


def test_a_reloaded_module_replaces_its_records(site):
    from importlib import reload

    package = write_plugin(site, "fast", GOOD)
    build(extra_ops="fast")
    module = reload(import_module(f"{package}.work"))
    assert build(extra_ops="fast").table.ops.norm.rms_norm.__wrapped__ is module.rms_norm


class Causal(AttentionPlan):
    """Attention of one sequence, without the engine."""

    def run(self, layer, query, key, value):
        heads = [part.transpose(0, 1)[None] for part in (query, key, value)]
        found = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return found[0].transpose(0, 1).flatten(1)


def small_model(backend):
    sizes = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    model = Qwen3(read_config(sizes), backend.ops)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def test_a_models_forward_and_backward_call_a_plugins_operations(site, caplog):
    write_plugin(site, "fast", GOOD)
    write_plugin(site, "other", TWO)
    plain, extended = build(purpose="train"), build(purpose="train", extra_ops="fast,other")
    outputs = []
    for backend in (plain, extended):
        model = small_model(backend)
        hidden = model(torch.arange(7), torch.arange(7), Causal())
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        outputs.append([hidden, *(weight.grad for weight in model.parameters() if weight.grad is not None)])
    assert {field: calls.count for field, calls in extended.table.calls.items()} == {
        "norm.rms_norm": 1,  # the first layer's; later norms are fused with the residual's sum
        "act.silu_and_mul": 3,
    }
    assert len(outputs[0]) == len(outputs[1]) > 20
    for expected, found in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    report_never_called(extended)
    assert "plugin_never_called" not in caplog.text


def test_plugin_never_called_is_a_warning(site, caplog):
    package = unique()
    text = (
        RMS_NORM
        + """
from polyrec.plugin_api import register_ops
def layer_norm(x, weight, bias, eps):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
def token_logp(hidden, weight, targets):
    return torch.log_softmax((hidden @ weight.T).float(), -1).gather(-1, targets[:, None])[:, 0]
def linear_cross_entropy(hidden, weight, targets):
    return -token_logp(hidden, weight, targets)
register_ops(norm={"rms_norm": rms_norm, "layer_norm": layer_norm}, loss={"linear_cross_entropy": linear_cross_entropy})
"""
    )
    write_plugin(site, "fast", text, package=package)
    backend = build(extra_ops="fast")
    report_never_called(backend)
    assert caplog.text.count("plugin_never_called") == 2
    caplog.clear()
    small_model(backend)(torch.arange(3), torch.arange(3), Causal())
    report_never_called(backend)
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    text = record.getMessage()
    assert text.startswith("[plugin_never_called] 'norm.layer_norm' of plugin fast (fast-dist 1.2.3)")
    assert "linear_cross_entropy" not in caplog.text, "serving never takes a loss"


def test_the_api_is_light_and_has_a_version_of_its_own():
    program = """
import sys
from polyrec.plugin_api import API_VERSION, Plugin, register_att_backend, register_ops
assert "torch" not in sys.modules
from polyrec.plugin_api import AttentionBackend
assert "torch" in sys.modules
print(API_VERSION)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == API_VERSION
    assert metadata.version("polyrec") != API_VERSION


def test_every_name_of_the_api_exists_and_others_do_not():
    assert [name for name in plugin_api.__all__ if not hasattr(plugin_api, name)] == []
    assert set(plugin_api.__all__) <= set(dir(plugin_api))
    with pytest.raises(AttributeError, match="no attribute 'register_op'"):
        _ = plugin_api.register_op


class NormLess(CpuBackend):
    """A platform without its own rms_norm, which all need."""

    def __init__(self):
        norms = dataclasses.replace(REFERENCE_OPS.norm, rms_norm=MISSING, add_rms_norm=MISSING)
        super().__init__(ops=dataclasses.replace(REFERENCE_OPS, norm=norms))


def test_a_plugin_makes_a_platform_start_that_lacks_a_required_operation(site, monkeypatch):
    write_plugin(site, "fast", GOOD)
    monkeypatch.setattr("polyrec.hardware.process.choose_platform", lambda config: Choice(NormLess, 0))
    refused("op_missing", "'cpu'", "norm.rms_norm (required)", "norm.add_rms_norm", "--extra-ops", fallback="strict")
    backend = build(extra_ops="fast", fallback="allow")
    small_model(backend)(torch.arange(3), torch.arange(3), Causal())
    assert backend.table.calls["norm.rms_norm"].count == 1 + backend.table.calls["norm.add_rms_norm"].count == 7
