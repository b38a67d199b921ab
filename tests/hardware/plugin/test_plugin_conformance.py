"""Numbers decide: a plugin whose operation computes something else is refused, whichever way it is wrong."""

from __future__ import annotations

from importlib import import_module

import pytest
from plugin_distributions import REGISTER, write_plugin
from toy_platform import ToyBackend

from polyrec.hardware.choose import Choice

from .building import build, refused

WHO = ("Plugin 'fast'", "fast-dist 1.2.3", "'norm.rms_norm'", "--extra-ops fast")
RIGHT = "x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype) * weight"
DETACHED = RIGHT.replace("torch.rsqrt(x.", "torch.rsqrt(x.detach().")


def plugin(site, body: str, name: str = "fast", before: str = "") -> str:
    text = f"import torch\n{before}\ndef rms_norm(x, weight, eps):\n    {body}\n"
    return write_plugin(site, name, text + REGISTER)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("return x * weight", "result"),
        ("return (" + RIGHT + ").double()", "float64"),
        ("return (" + RIGHT + ")[:1]", "["),
        ("return None", "None"),
        ("x.copy_(" + RIGHT + ")\n    return x", "x was changed"),
    ],
)
@pytest.mark.parametrize("level", ["quick", "full"])
def test_plugin_conformance(site, body, word, level):
    plugin(site, body)
    refused("plugin_conformance", *WHO, word, extra_ops="fast", verify_plugins=level)


def test_an_exception_is_kept_as_the_cause(site):
    plugin(site, "raise LookupError('no kernel for this shape')")
    error = refused("plugin_conformance", *WHO, "raised", "no kernel for this shape", "float32", extra_ops="fast")
    causes = [error]
    while causes[-1].__cause__:
        causes.append(causes[-1].__cause__)
    assert isinstance(causes[-1], LookupError)


def test_a_wrong_gradient_is_refused_when_training_only(site):
    plugin(site, "return " + DETACHED)
    assert build(extra_ops="fast").table.row("norm.rms_norm").origin == "plugin"
    refused("plugin_conformance", *WHO, "gradient of x", extra_ops="fast", purpose="train")


def test_a_result_without_a_gradient_is_refused_when_training(site):
    plugin(site, "with torch.no_grad():\n        return " + RIGHT)
    refused("plugin_conformance", *WHO, "has no gradient", extra_ops="fast", purpose="train")


def test_op_infer_only_names_every_such_plugin(site):
    claim = "from polyrec.plugin_api import op_claims"
    write_plugin(
        site,
        "fast",
        f"import torch\n{claim}\n@op_claims(train=False)\ndef rms_norm(x, weight, eps):\n    return {RIGHT}\n{REGISTER}",
    )
    act = "@op_claims(train=False)\ndef f(x):\n    gate, up = x.chunk(2, -1)\n    return torch.nn.functional.silu(gate) * up\n"
    register = "from polyrec.plugin_api import register_ops\nregister_ops(act={'silu_and_mul': f})"
    write_plugin(site, "other", f"import torch\n{claim}\n{act}{register}")
    assert build(extra_ops="fast,other").table.row("norm.rms_norm").train is False
    refused(
        "op_infer_only",
        "norm.rms_norm of fast (fast-dist 1.2.3)",
        "act.silu_and_mul of other (other-dist 1.2.3)",
        extra_ops="fast,other",
        purpose="train",
    )


STALE = """
_kept = {}
def stale(x, make):
    if x.data_ptr() not in _kept:
        _kept[x.data_ptr()] = (x, make())
    return _kept[x.data_ptr()][1].clone()
"""


@pytest.fixture
def on_toy(monkeypatch):
    """Builds are for a platform whose graphs record."""
    return lambda: monkeypatch.setattr("polyrec.hardware.process.choose_platform", lambda config: Choice(ToyBackend, 0))


def test_a_result_remembered_by_address_fails_the_replay(site, on_toy):
    on_toy()
    plugin(site, f"return stale(x, lambda: {RIGHT})", before=STALE)
    refused("plugin_conformance", *WHO, "replayed on new values", extra_ops="fast")


def test_an_operation_that_reads_values_on_the_host_cannot_be_captured(site, on_toy):
    """Right on the CPU, whose graphs call; refused where graphs record, unless it claims no capture."""
    body = "eps = eps if bool((x == x).all()) else eps\n    return " + RIGHT
    plugin(site, body)
    build(extra_ops="fast")
    on_toy()
    error = refused("plugin_conformance", *WHO, "raised", extra_ops="fast")
    assert error.__cause__.__cause__ is not None
    package = plugin(site, body, name="frank")
    text = (site / package / "work.py").read_text(encoding="utf-8")
    claim = "from polyrec.plugin_api import op_claims\n@op_claims(graph_safe=False)\ndef rms_norm"
    (site / package / "work.py").write_text(text.replace("def rms_norm", claim), encoding="utf-8")
    row = build(extra_ops="frank").table.row("norm.rms_norm")
    assert (row.origin, row.graph_safe) == ("plugin", False)


def test_full_checks_every_dtype_and_quick_the_first(site):
    plugin(site, "return " + RIGHT + " * (2 if x.dtype == torch.bfloat16 else 1)")
    build(extra_ops="fast")
    refused("plugin_conformance", *WHO, extra_ops="fast", verify_plugins="full")


def test_only_claimed_dtypes_are_checked(site):
    claim = "from polyrec.plugin_api import op_claims\n@op_claims(dtypes=(torch.float32,))"
    plugin(site, "return " + RIGHT + " * (2 if x.dtype == torch.bfloat16 else 1)", before=claim)
    backend = build(extra_ops="fast", verify_plugins="full")
    assert backend.table.row("norm.rms_norm").dtypes == ("float32",)


def test_off_calls_nothing(site):
    package = plugin(site, "calls.append(x)\n    return x", before="calls = []")
    assert build(extra_ops="fast", verify_plugins="off").table.row("norm.rms_norm").origin == "plugin"
    assert import_module(f"{package}.work").calls == []


def test_checking_does_not_count_as_calling(site):
    plugin(site, "return " + RIGHT)
    backend = build(extra_ops="fast", verify_plugins="full")
    assert backend.table.calls["norm.rms_norm"].count == 0
    assert [row.field for row in backend.table.never_called()] == ["norm.rms_norm"]
