"""`polyrec plugins` reads what plugins would register, and imports none."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys

import pytest
from plugin_distributions import ATT, OPS, REGISTER, RMS_NORM, on_path, unique, write_distribution, write_plugin

from polyrec.hardware.plugin.sources import SourceFault, read_source
from polyrec.hardware.plugin.survey import UNKNOWN, inspect_plugins

from .building import build, refused

GOOD = RMS_NORM + REGISTER
ATTENTION = 'from polyrec.plugin_api import register_att_backend\n@register_att_backend("own")\nclass Own: pass\n'
BOMB = "raise SystemExit('a plugin was imported')\n"


def report(name: str):
    """The report of one plugin, everything else installed left out."""
    importlib.invalidate_caches()
    before = set(sys.modules)
    [found] = [plugin for plugin in inspect_plugins().plugins if plugin.name == name]
    assert [module for module in set(sys.modules) - before if module.startswith("throwaway_")] == []
    return found


def registered(name: str) -> dict[str, str]:
    return {one.key: one.implementation for one in report(name).registers}


def test_everything_about_one_plugin(site):
    returned = "Plugin([WORK], platforms='cpu', api='>=1,<2', requires=['torch>=2'])"
    package = write_plugin(site, "fast", GOOD + BOMB, returned=returned)
    found = report("fast")
    assert (found.kind, found.group, found.distribution, found.version) == ("ops", OPS, "fast-dist", "1.2.3")
    assert (found.entry_point, found.location) == (f"{package}.register:register", str(site))
    assert (found.modules, found.platforms) == ((f"{package}.work",), ("cpu",))
    assert (set(found.api.split(",")), found.requires) == ({">=1", "<2"}, ("torch>=2",))
    [one] = found.registers
    assert (one.key, one.implementation, one.module, one.conditional) == (
        "norm.rms_norm",
        "rms_norm",
        f"{package}.work",
        False,
    )
    assert "register_ops" in (site / package / "work.py").read_text(encoding="utf-8").splitlines()[one.line - 1]
    assert found.faults == ()


def test_attention_by_decorator_and_by_call(site):
    write_plugin(site, "own", ATTENTION + 'register_att_backend("second")(make(Own))\n' + BOMB, group=ATT)
    assert registered("own") == {"own": "Own", "second": "make(Own)"}


def test_groups_are_in_order_and_plugins_by_name(site):
    for name, group in (("zeta", ATT), ("beta", OPS), ("alpha", OPS), ("eta", ATT)):
        write_plugin(site, name, GOOD if group == OPS else ATTENTION, group=group)
    importlib.invalidate_caches()
    names = [plugin.name for plugin in inspect_plugins().plugins if plugin.name in {"zeta", "beta", "alpha", "eta"}]
    assert names == ["alpha", "beta", "eta", "zeta"]


@pytest.mark.parametrize(
    "body",
    [
        "return [f'{__package__}.work']",
        "return (__package__ + '.work',)",
        "return MODULES",
        "from polyrec import plugin_api\n    return plugin_api.Plugin(modules=MODULES)",
        "from polyrec.plugin_api import Plugin as P\n    return P(MODULES, None, '', ())",
        "def inner():\n        return 3\n    return MODULES",
    ],
)
def test_literal_returns_in_many_forms(site, body):
    package = write_plugin(site, "fast", GOOD)
    text = f"NAME = 'work'\nMODULES: list = [f'{{__package__}}.{{NAME}}']\ndef register():\n    {body}\n"
    (site / package / "register.py").write_text(text, encoding="utf-8")
    assert report("fast").modules == (f"{package}.work",)
    assert build(extra_ops="fast").table.row("norm.rms_norm").origin == "plugin", "and it is what happens"


@pytest.mark.parametrize(
    "body",
    [
        "return make()",
        "return [make()]",
        "if make():\n        return ['a']\n    return ['b']",
        "if make():\n        return ['a']",
        "return TWICE",
        "return Plugin(*make())",
        "return Plugin(modules=['a'], platforms=make())",
        "pass",
    ],
)
def test_what_is_decided_when_it_runs_is_unknown_and_no_fault(site, body):
    package = write_plugin(site, "fast", GOOD)
    text = f"from polyrec.plugin_api import Plugin\nTWICE = ['a']\nTWICE += ['b']\ndef register():\n    {body}\n"
    (site / package / "register.py").write_text(text, encoding="utf-8")
    found = report("fast")
    assert (found.modules, found.registers, found.faults) == (None, (), ())


@pytest.mark.parametrize(
    "text",
    [
        "register = lambda: [f'{__package__}.work']",
        "import functools\ndef make(name): return [name]\nregister = functools.partial(make, f'{__package__}.work')",
        "if True:\n    def register(): return f'{__package__}.work'",
        "from .real import *",
        "from . import real\nregister: object = real.register",
        "class register(list):\n    def __init__(self): super().__init__([f'{__package__}.work'])",
    ],
)
def test_a_function_that_is_made_when_it_runs_is_unknown_and_no_fault(site, text):
    package = write_plugin(site, "fast", GOOD)
    folder = site / package
    (folder / "real.py").write_text((folder / "register.py").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "register.py").write_text(text, encoding="utf-8")
    found = report("fast")
    assert (found.modules, found.faults) == (None, ())
    assert build(extra_ops="fast").table.row("norm.rms_norm").origin == "plugin", "and it loads"


def test_registrations_that_depend_on_something(site):
    text = (
        RMS_NORM
        + """
from polyrec.plugin_api import register_ops as reg
import polyrec.plugin_api as api
FIELD = "add_rms_norm"
reg(norm={FIELD: rms_norm, key(): rms_norm, **more}, act=table, **rest)
if torch.cuda.is_available():
    api.register_ops(norm={"layer_norm": rms_norm})
def later():
    reg(norm={"rms_norm": rms_norm})
"""
    )
    write_plugin(site, "fast", text)
    found = [(one.key, one.implementation, one.conditional) for one in report("fast").registers]
    assert found == [
        ("norm.add_rms_norm", "rms_norm", False),
        (UNKNOWN, "rms_norm", False),
        (UNKNOWN, "more", False),
        (UNKNOWN, "table", False),
        (UNKNOWN, "rest", False),
        ("norm.layer_norm", "rms_norm", True),
        (UNKNOWN, "called inside a function", True),
    ]


@pytest.mark.parametrize(
    "line", ["from . import inner", "from .inner import rms_norm", "import {}.inner", "import {0}, {0}.inner as it"]
)
def test_modules_that_a_listed_module_imports_are_read_too(site, line):
    package = write_plugin(site, "fast", "")
    (site / package / "inner.py").write_text(GOOD, encoding="utf-8")
    (site / package / "work.py").write_text(line.format(package) + "\nfrom math import sqrt\n", encoding="utf-8")
    assert registered("fast") == {"norm.rms_norm": "rms_norm"}
    assert build(extra_ops="fast").table.row("norm.rms_norm").origin == "plugin", "and it is what happens"


def test_a_function_that_is_imported_into_the_entry_points_module(site):
    package = write_plugin(site, "fast", GOOD)
    (site / package / "real.py").write_text(
        (site / package / "register.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (site / package / "register.py").write_text("from .real import register\n", encoding="utf-8")
    assert registered("fast") == {"norm.rms_norm": "rms_norm"}


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"work.py": None}, "plugin_import_failed", ["is not installed", ".work"]),
        ({"register.py": None}, "plugin_import_failed", ["is not installed", ".register"]),
        ({"register.py": "def another(): pass"}, "plugin_import_failed", ["no function 'register'"]),
        ({"work.py": "def ("}, "plugin_import_failed", ["cannot be read"]),
        ({"work.py": "x = 1"}, "plugin_registers_nothing", ["no call of register_ops"]),
        ({"register.py": "def register():\n    return []"}, "plugin_return_invalid", ["Return ["]),
        ({"register.py": "def register():\n    return Plugin('a', api='>=9')"}, "plugin_api_range", [">=9"]),
        ({"register.py": "def register():\n    return Plugin('a', requires='absent-dist')"}, "plugin_requirement", ["absent"]),
    ],
)  # fmt: skip
def test_faults_that_can_be_seen(site, change, code, words):
    package = write_plugin(site, "fast", GOOD)
    for name, text in change.items():
        path = site / package / name
        path.unlink() if text is None else path.write_text(text, encoding="utf-8")
    fault = report("fast").faults[0]
    assert fault.startswith(f"{code}: ")
    for word in words:
        assert word in fault


def test_duplicate_names_and_hidden_metadata_are_faults(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    write_distribution(old, "Fast.Dist", {}, {}, version="0.9")
    write_plugin(new, "hidden", GOOD, distribution="fast-dist")
    write_plugin(new, "twin", GOOD, distribution="first-dist")
    write_plugin(new, "twin", GOOD, distribution="second-dist")
    with on_path(old, new):
        found = inspect_plugins()
    twins = [plugin for plugin in found.plugins if plugin.name == "twin"]
    assert [plugin.distribution for plugin in twins] == ["first-dist", "second-dist"]
    assert all(plugin.faults[0].startswith("plugin_name_duplicate") for plugin in twins)
    assert "hidden" not in {plugin.name for plugin in found.plugins}
    [stale] = [fault for fault in found.faults if fault.startswith("plugin_metadata_stale")]
    for word in ("'hidden'", "1.2.3", "0.9", str(old), str(new)):
        assert word in stale


def test_lines_that_are_no_entry_points_are_faults_and_hurt_no_other(site):
    package = write_plugin(site, "fast", GOOD)
    points = site / "fast_dist-1.2.3.dist-info" / "entry_points.txt"
    points.write_text(points.read_text(encoding="utf-8") + "broken line\n", encoding="utf-8")
    assert report("fast").entry_point == f"{package}.register:register"
    assert any("'broken line'" in fault for fault in inspect_plugins().faults)
    build(extra_ops="fast")


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA"])
def test_metadata_that_is_no_utf8_hurts_no_other(site, file):
    write_plugin(site, "fast", GOOD)
    write_plugin(site, "broken", GOOD, distribution="broken-dist")
    path = site / "broken_dist-1.2.3.dist-info" / file
    path.write_bytes(path.read_bytes() + b"\xff\xfe = a:b\n")
    build(extra_ops="fast")
    found = inspect_plugins()
    assert report("fast").faults == ()
    if file == "METADATA":  # its entry points can be read, and are listed under no name
        assert report("broken").distribution == "(a distribution without a name)"
    else:
        assert [fault for fault in found.faults if "broken-dist 1.2.3" in fault and "entry_points.txt" in fault]
        refused("plugin_unknown", "'broken'", extra_ops="broken")


def test_a_package_that_another_finder_knows_is_found(site, tmp_path, monkeypatch):
    """As editable installs put it: the top-level name is found by a finder of their own, outside every folder of the path."""
    away = tmp_path / "away"
    package = write_plugin(away, "fast", GOOD)
    (away / "fast_dist-1.2.3.dist-info").rename(site / "fast_dist-1.2.3.dist-info")

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != package:
                return None
            folder = away / package
            return importlib.util.spec_from_file_location(
                name, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert registered("fast") == {"norm.rms_norm": "rms_norm"}


@pytest.mark.parametrize(
    ("module", "why"),
    [("absent_package.x", "no 'absent_package"), ("math", "no Python source"), ("json.absent", "json.absent")],
)
def test_modules_without_a_source(module, why):
    with pytest.raises(SourceFault, match=why):
        read_source(module)


def test_the_report_is_json_and_needs_no_torch(site):
    write_plugin(site, "fast", GOOD)
    program = f"""
import dataclasses, json, sys
sys.path.insert(0, {str(site)!r})
from polyrec.hardware.plugin.survey import inspect_plugins
print(json.dumps([dataclasses.asdict(inspect_plugins()), "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    values, torch_loaded = json.loads(done.stdout)
    assert not torch_loaded
    importlib.invalidate_caches()
    assert values == json.loads(json.dumps(dataclasses.asdict(inspect_plugins())))
    assert "fast" in {plugin["name"] for plugin in values["plugins"]}


def test_package_names_are_unique():
    assert unique() != unique()
