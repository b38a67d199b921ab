"""Every way in which loading a plugin is refused: code, plugin, distribution, version, remedy."""

from __future__ import annotations

import sys

import pytest
from plugin_distributions import ATT, OPS, REGISTER, RMS_NORM, on_path, unique, write_distribution, write_plugin

from polyrec.hardware import get_hardware_backend

from .building import build, refused

GOOD = RMS_NORM + REGISTER
WHO = ("Plugin 'fast'", "fast-dist 1.2.3")
REGISTER_F = "from polyrec.plugin_api import op_claims, register_ops\n"
ATTENTION = """
from polyrec.attention.sdpa import SdpaAttention
from polyrec.plugin_api import register_att_backend

@register_att_backend("NAME")
class Own(SdpaAttention):
    pass
"""


@pytest.fixture(autouse=True)
def chosen_before_and_after():
    """Whatever a plugin does wrong, the process keeps what it has."""
    before = get_hardware_backend()
    table, ops = before.table, before.ops
    yield
    assert get_hardware_backend() is before
    assert before.table is table
    assert before.ops is ops


def test_plugin_unknown_names_the_closest_and_the_installed(site):
    write_plugin(site, "fast_norms", GOOD)
    write_plugin(site, "other", GOOD)
    refused(
        "plugin_unknown",
        "'fast_nroms'",
        "fast_norms (fast-norms-dist 1.2.3)",
        "other (other-dist 1.2.3)",
        "Did you mean 'fast_norms'?",
        extra_ops="fast_nroms",
    )


def test_plugin_unknown_says_where_to_look_when_nothing_is_near(site):
    refused("plugin_unknown", "'zzz'", "polyrec plugins", extra_ops="zzz")


@pytest.mark.parametrize(
    ("group", "wrong", "right"), [(OPS, "extra_att", "--extra-ops"), (ATT, "extra_ops", "--extra-att")]
)
def test_plugin_unknown_says_that_it_is_in_the_other_group(site, group, wrong, right):
    write_plugin(site, "fast", GOOD, group=group)
    refused("plugin_unknown", "fast (fast-dist 1.2.3)", "other group", f"{right} fast", **{wrong: "fast"})


def test_names_are_matched_exactly(site):
    write_plugin(site, "fast_norms", GOOD)
    refused("plugin_unknown", "Did you mean 'fast_norms'?", extra_ops="fast-norms")
    refused("plugin_unknown", extra_ops="Fast_norms")


def test_plugin_name_duplicate_names_both_distributions(site):
    write_plugin(site, "fast", GOOD, distribution="first-dist", version="1.0")
    write_plugin(site, "fast", GOOD, distribution="second-dist", version="2.0")
    refused(
        "plugin_name_duplicate",
        "--extra-ops fast",
        "first-dist 1.0",
        "second-dist 2.0",
        "Uninstall one",
        extra_ops="fast",
    )


@pytest.mark.parametrize(
    "returned",
    ["None", "3", "[]", "['no module']", "[3]", "{'a': 1}", "['.relative']", "Plugin(modules=[])", "Plugin(3)",
     "Plugin(WORK, platforms=())", "Plugin(WORK, api=1)", "Plugin(WORK, api='about 1')", "Plugin(WORK, requires=[3])",
     "Plugin(WORK, requires=['!!'])"],
)  # fmt: skip
def test_plugin_return_invalid(site, returned):
    write_plugin(site, "fast", GOOD, returned=returned)
    refused("plugin_return_invalid", *WHO, "Return [", extra_ops="fast")


def test_plugin_field_unknown_names_the_closest(site):
    write_plugin(site, "fast", RMS_NORM + REGISTER.replace('"rms_norm"', '"rms_nrom"'))
    refused("plugin_field_unknown", *WHO, "'norm.rms_nrom'", "Did you mean 'norm.rms_norm'?", extra_ops="fast")


def test_an_unknown_group_is_an_unknown_field(site):
    write_plugin(site, "fast", RMS_NORM + REGISTER.replace("norm=", "norms="))
    refused("plugin_field_unknown", *WHO, "'norms.rms_norm'", "'norm.rms_norm'", extra_ops="fast")


@pytest.mark.parametrize(
    "call",
    ['register_ops(norm={"rms_norm": "rms_norm"})', "register_ops(norm=None)", 'register_ops(norm=["rms_norm"])'],
)
def test_plugin_not_callable(site, call):
    write_plugin(site, "fast", REGISTER_F + call)
    refused("plugin_not_callable", *WHO, "norm", extra_ops="fast")


def test_an_attention_decorator_without_a_name_is_not_callable(site):
    text = "from polyrec.plugin_api import register_att_backend\n@register_att_backend\nclass Own: pass\n"
    write_plugin(site, "fast", text, group=ATT)
    refused("plugin_not_callable", *WHO, '@register_att_backend("name")', extra_att="fast")


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ("x, weight", "it has no eps"),
        ("x, eps, weight", "another order"),
        ("a, weight, eps", "it has no x"),
        ("x, weight, *, eps", "by name only"),
        ("x, /, weight, eps", "positional-only"),
        ("x, weight, eps=1", "has the default 1, and must have none"),
        ("x, weight, eps, block", "'block' is one more and has no default"),
        ("x, block=4, weight=None, eps=0", "another order"),
        ("*args", "'*args' hides"),
        ("x, weight, eps, **rest", "'**rest' hides"),
    ],
)
def test_plugin_signature_prints_both(site, parameters, fault):
    write_plugin(site, "fast", REGISTER_F + f"def f({parameters}): pass\nregister_ops(norm={{'rms_norm': f}})")
    refused("plugin_signature", *WHO, fault, "(x, weight, eps)", f"({parameters})", "Wrap it", extra_ops="fast")


@pytest.mark.parametrize("builtin", ["torch.rsqrt", "torch.ops.aten.rsqrt.default"])
def test_a_builtin_whose_parameters_cannot_be_read_must_be_wrapped(site, builtin):
    write_plugin(site, "fast", REGISTER_F + f"import torch\nregister_ops(norm={{'rms_norm': {builtin}}})")
    refused("plugin_signature", *WHO, "Wrap it in a function", extra_ops="fast")


@pytest.mark.parametrize(
    "dtypes", ["(torch.float64,)", "(torch.bfloat16, torch.int8)", "()", "('bfloat16',)", "torch.float32"]
)
def test_plugin_dtype(site, dtypes):
    claim = f"import torch\nregister_ops(norm={{'rms_norm': op_claims(dtypes={dtypes})(rms_norm)}})"
    write_plugin(site, "fast", RMS_NORM + REGISTER_F + claim)
    refused("plugin_dtype", *WHO, "norm.rms_norm", "torch.float32, torch.bfloat16, torch.float16", extra_ops="fast")


@pytest.mark.parametrize(
    ("line", "cause", "words"),
    [
        ("import no_such_module_at_all", ModuleNotFoundError, ["no_such_module_at_all' belongs to"]),
        ("raise SystemExit('bye')", SystemExit, ["SystemExit: bye", "--extra-ops fast"]),
        ("1 / 0", ZeroDivisionError, ["ZeroDivisionError: division by zero", "--extra-ops fast"]),
    ],
)
def test_plugin_import_failed_keeps_the_cause_and_no_records(site, line, cause, words):
    package = write_plugin(site, "fast", GOOD + line)
    error = refused("plugin_import_failed", *WHO, f"{package}.work", *words, extra_ops="fast")
    assert isinstance(error.__cause__, cause)
    (site / package / "work.py").write_text(GOOD, encoding="utf-8")
    assert build(extra_ops="fast").table.row("norm.rms_norm").origin == "plugin", "mended, it loads in the same process"


def test_what_a_helper_registered_before_the_failure_is_dropped_too(site):
    package = write_plugin(
        site, "fast", "from . import helper\nimport os\nif 'THROWAWAY' not in os.environ: raise OSError('no')"
    )
    (site / package / "helper.py").write_text(GOOD, encoding="utf-8")
    refused("plugin_import_failed", *WHO, extra_ops="fast")
    assert f"{package}.helper" not in sys.modules
    (site / package / "work.py").write_text("from . import helper\n", encoding="utf-8")
    assert build(extra_ops="fast").table.row("norm.rms_norm").source == "fast (fast-dist 1.2.3)"


def test_a_failed_import_leaves_no_record_to_a_later_one(site):
    package = write_plugin(site, "fast", GOOD + "1 / 0")
    refused("plugin_import_failed", *WHO, extra_ops="fast")
    other = "def f(x):\n    gate, up = x.chunk(2, -1)\n    return gate * gate.sigmoid() * up\n"
    text = REGISTER_F + other + "register_ops(act={'silu_and_mul': f})\n"
    (site / package / "work.py").write_text(text, encoding="utf-8")
    assert [row.field for row in build(extra_ops="fast").table.rows if row.origin == "plugin"] == ["act.silu_and_mul"]


@pytest.mark.parametrize(
    ("register", "cause"),
    [
        ("import no_such_module_at_all\n", ModuleNotFoundError),
        ("def another(): pass\n", AttributeError),
        ("def register():\n    raise KeyError('x')\n", KeyError),
    ],
)
def test_the_entry_points_own_failure_is_an_import_failure(site, register, cause):
    package = write_plugin(site, "fast", GOOD)
    (site / package / "register.py").write_text(register, encoding="utf-8")
    error = refused("plugin_import_failed", *WHO, f"{package}.register:register", extra_ops="fast")
    assert isinstance(error.__cause__, cause)


@pytest.mark.parametrize("function", ["get_hardware_backend", "build_hardware_backend"])
@pytest.mark.parametrize("guard", ["{}()", "try: {}()\nexcept Exception: pass"])
def test_plugin_import_reentrant(site, function, guard):
    argument = guard.format(function).replace("()", "(HardwareConfig())")
    write_plugin(site, "fast", f"from polyrec.hardware import HardwareConfig, {function}\n{argument}\n" + GOOD)
    refused("plugin_import_reentrant", *WHO, function, "Register at import", extra_ops="fast")


def test_an_entry_point_that_builds_hardware_is_reentrant_too(site):
    package = write_plugin(site, "fast", GOOD)
    text = "from polyrec.hardware import get_hardware_backend\ndef register():\n    return get_hardware_backend()\n"
    (site / package / "register.py").write_text(text, encoding="utf-8")
    refused("plugin_import_reentrant", *WHO, "get_hardware_backend", extra_ops="fast")


DECLARATIONS = [
    ("Plugin(WORK, platforms=('ascend', 'musa'))", "plugin_platform", ["ascend, musa", "'cpu'", "--hardware-platform"]),
    ("Plugin(WORK, platforms='ascend')", "plugin_platform", ["ascend", "'cpu'"]),
    ("Plugin(WORK, api='>=2')", "plugin_api_range", [">=2", "1.0"]),
    ("Plugin([WORK], api='<1.0')", "plugin_api_range", ["<1.0", "1.0"]),
    ("Plugin(WORK, requires=('no-such-distribution>=1',))", "plugin_requirement", ["not installed", "pip install"]),
    ("Plugin(WORK, requires='torch<1')", "plugin_requirement", ["torch<1", "is installed", "pip install 'torch<1'"]),
]


@pytest.mark.parametrize(("returned", "code", "words"), DECLARATIONS)
def test_declarations_are_refused_before_any_module_is_imported(site, returned, code, words):
    good = write_plugin(site, "good", GOOD)
    package = write_plugin(site, "fast", GOOD, returned=returned)
    refused(code, *WHO, *words, extra_ops="good,fast")
    assert not {f"{good}.work", f"{package}.work"} & sys.modules.keys()


def test_a_requirements_extra_is_checked(site):
    write_distribution(
        site, "base-dist", {}, {}, "3.0", requires=("absent-dist; extra == 'gpu'", "also-absent; extra == 'tpu'")
    )
    write_plugin(site, "fast", GOOD, returned="Plugin(WORK, requires='base-dist[gpu]>=2')")
    error = refused("plugin_requirement", *WHO, "absent-dist", extra_ops="fast")
    assert "also-absent" not in str(error)


@pytest.mark.parametrize(("version", "shown"), [("", "an unknown version"), ("of-my-own", "of-my-own")])
def test_a_requirement_whose_version_is_none_is_unmet_where_one_is_asked_for(site, version, shown):
    write_distribution(site, "left-over", {}, {}, "1.0")
    (site / "left_over-1.0.dist-info" / "METADATA").write_text(f"Name: left-over\nVersion: {version}\n", "utf-8")
    write_plugin(site, "fast", GOOD, returned="Plugin(WORK, requires='left-over>=1')")
    refused("plugin_requirement", *WHO, "left-over>=1", shown, extra_ops="fast")
    write_plugin(site, "faster", GOOD, returned="Plugin(WORK, requires='left-over')")
    build(extra_ops="faster")


def test_plugin_conflict_is_settled_by_a_pin_only(site):
    write_plugin(site, "fast", GOOD)
    write_plugin(site, "faster", GOOD, version="2.0")
    for order in ("fast,faster", "faster,fast"):
        refused(
            "plugin_conflict",
            "'norm.rms_norm'",
            "fast (fast-dist 1.2.3)",
            "faster (faster-dist 2.0)",
            "--op norm.rms_norm=",
            extra_ops=order,
        )
    for name in ("fast", "faster"):
        row = build(extra_ops="fast,faster", op={"norm.rms_norm": name}).table.row("norm.rms_norm")
        assert row.source.startswith(f"{name} (")


def test_a_plugin_in_conflict_with_itself(site):
    package = write_plugin(site, "fast", GOOD, returned="[WORK, WORK + '2']")
    (site / package / "work2.py").write_text(GOOD, encoding="utf-8")
    refused("plugin_conflict", *WHO, "twice", f"{package}.work2", extra_ops="fast")


def test_a_module_that_registers_two_functions_for_one_field(site):
    again = "\nregister_ops(norm={'rms_norm': lambda x, weight, eps: x})"
    write_plugin(site, "fast", GOOD + again)
    refused("plugin_conflict", *WHO, "twice", extra_ops="fast")


def test_plugin_conflict_of_attention_names(site):
    write_plugin(site, "fast", ATTENTION.replace("NAME", "own"), group=ATT)
    write_plugin(site, "faster", ATTENTION.replace("NAME", "own"), group=ATT)
    refused("plugin_conflict", "'own'", "fast (fast-dist 1.2.3)", "faster (faster-dist 1.2.3)", extra_att="fast,faster")


@pytest.mark.parametrize("name", ["sdpa", "auto"])
def test_attention_taken(site, name):
    write_plugin(site, "fast", ATTENTION.replace("NAME", name), group=ATT)
    refused("attention_taken", *WHO, f"'{name}'", "another name", extra_att="fast")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("class Own: pass", "no subclass of AttentionBackend"),
        ("class Own(AttentionBackend): pass", "it lacks packed, search"),
        ("class Own(SdpaAttention): support = None", "no `support`"),
        ("class Own(SdpaAttention): support = AttentionSupport", "no `support`"),
        ("class Own(SdpaAttention): support = AttentionSupport(head_dims=64)", "head_dims=64"),
        ("class Own(SdpaAttention): support = AttentionSupport(dtypes=('bf16',))", "dtypes=('bf16',)"),
        ("class Own(SdpaAttention): support = AttentionSupport(platforms='cpu')", "platforms='cpu'"),
        (
            "class Own(SdpaAttention):\n    def packed(self, layout): pass",
            "`packed` is not the contract's: it has no cache",
        ),
        ("class Own(SdpaAttention):\n    def search(self, *all, **named): pass", "`search` is not the contract's"),
        ("class Own(SdpaAttention):\n    packed = 3", "`packed`"),
        ("class Own(SdpaAttention):\n    def __init__(self): pass", "cannot be constructed from (needs, ops)"),
        ("def Own(needs, ops): pass", "no subclass of AttentionBackend"),
    ],
)
def test_attention_not_a_backend(site, body, fault):
    head = "from polyrec.attention.sdpa import SdpaAttention\nfrom polyrec.plugin_api import *\n"
    write_plugin(site, "fast", f'{head}@register_att_backend("own")\n{body}\n', group=ATT)
    refused("attention_not_a_backend", *WHO, "'own'", fault, extra_att="fast")


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ({"norm.rms_nrom": "fast"}, ["is no operation", "Did you mean 'norm.rms_norm'?"]),
        ({"norm.rms_norm": "faster"}, ["'faster' is not loaded", "fast (fast-dist 1.2.3)", "--extra-ops faster"]),
        ({"norm.layer_norm": "fast"}, ["fast (fast-dist 1.2.3) does not register 'norm.layer_norm'"]),
    ],
)
def test_pin_unused(site, pin, words):
    write_plugin(site, "fast", GOOD)
    write_plugin(site, "faster", GOOD)
    refused("pin_unused", "--op", *words, extra_ops="fast", op=pin)


def test_a_pin_without_plugins_is_unused(site):
    refused("pin_unused", "--op norm.rms_norm=fast", "loaded: none", "--extra-ops fast", op="norm.rms_norm=fast")


@pytest.mark.parametrize(
    ("group", "flag", "how"), [(OPS, "extra_ops", "register_ops("), (ATT, "extra_att", "@register_att_backend(")]
)
def test_plugin_registers_nothing(site, group, flag, how):
    write_plugin(site, "fast", "x = 1\n", group=group)
    refused("plugin_registers_nothing", *WHO, how, f"--{flag.replace('_', '-')} fast", **{flag: "fast"})


def test_all_or_nothing(site):
    """One wrong field of one of two plugins: neither is used, and the next build without it is the built-in table."""
    write_plugin(site, "good", GOOD)
    write_plugin(site, "fast", REGISTER_F + "def f(y): pass\nregister_ops(act={'silu_and_mul': f})")
    refused("plugin_signature", *WHO, extra_ops="good,fast")
    assert all(row.origin != "plugin" for row in build().table.rows)


def test_plugin_metadata_stale_hides_a_plugin_and_says_so(tmp_path, caplog):
    package = unique()
    old, new = tmp_path / "old", tmp_path / "new"
    write_distribution(old, "Fast_Dist", {}, {}, version="1.0")
    write_plugin(new, "fast", GOOD, distribution="fast-dist", version="2.0", package=package)
    with on_path(old, new):
        error = refused("plugin_unknown", "'fast'", extra_ops="fast")
        assert "fast-dist 2.0" in error.remedy
        assert "1.0" in error.remedy
        [record] = [record for record in caplog.records if "plugin_metadata_stale" in record.message]
        assert str(new) in record.getMessage()
        assert str(old) in record.getMessage()
    with on_path(new, old):
        caplog.clear()
        assert build(extra_ops="fast").table.row("norm.rms_norm").source == "fast (fast-dist 2.0)"
        assert "stale" not in caplog.text
