"""`polyrec plugins`: the list imports nothing; `new` writes a distribution that is found, loads, and passes its own tests."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polyrec import __version__
from polyrec.cli.plugin_skeleton import Skeleton
from polyrec.core.errors import ConfigError
from polyrec.plugin_api import API_VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REGISTRATION_KEYS = {"key", "implementation", "module", "line", "conditional"}
PLUGIN_KEYS = {
    *("kind", "group", "name", "distribution", "version", "entry_point", "location"),
    *("modules", "platforms", "api", "requires", "registers", "faults"),
}


def install(folder: Path) -> None:
    """What an editable install leaves beside the package: metadata, made from the project's own pyproject.toml."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(head, encoding="utf-8")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")


def process(*command: object, path: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process whose import path begins with `path`."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        cwd=path,
    )


def polyrec_process(*arguments: object, path: Path) -> subprocess.CompletedProcess[str]:
    return process("polyrec.cli.main", *arguments, path=path)


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory, polyrec) -> Path:
    """A plugin that the command wrote, with its metadata."""
    folder = tmp_path_factory.mktemp("plugins") / "quick-norms"
    result = polyrec("plugins", "new", "quick-norms", "--out", folder)
    assert result.exit_code == 0
    assert "--extra-ops quick_norms_ops --extra-att quick_norms_att" in result.output
    install(folder)
    return folder


def test_a_skeleton_has_a_project_a_package_a_page_and_tests(skeleton):
    found = {path.relative_to(skeleton).as_posix() for path in skeleton.rglob("*") if path.is_file()}
    assert found == {
        "README.md",
        "pyproject.toml",
        *(f"quick_norms/{name}.py" for name in ("__init__", "attention", "ops", "register")),
        "tests/test_conformance.py",
        *(f"quick_norms-0.0.1.dist-info/{name}" for name in ("METADATA", "entry_points.txt")),
    }
    for name in found:
        text = (skeleton / name).read_text(encoding="utf-8")
        assert "$" not in text, f"{name} has a name that was not filled in"
        if name.endswith(".py"):
            compile(text, name, "exec")
    project = tomllib.loads((skeleton / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["name"], project["dependencies"]) == ("quick-norms", [f"polyrec>={__version__}"])


def test_a_skeleton_passes_its_own_tests(skeleton):
    done = process("pytest", "-q", "-p", "no:cacheprovider", skeleton, path=skeleton)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 10


def test_a_wrong_operation_in_a_skeleton_fails_its_tests(skeleton, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(skeleton, copy)
    ops = copy / "quick_norms" / "ops.py"
    ops.write_text(ops.read_text(encoding="utf-8").replace("+ eps", "+ 10 * eps + 0.01"), encoding="utf-8")
    done = process("pytest", "-q", "-p", "no:cacheprovider", "-k", "TestOps", copy, path=copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "norm.rms_norm" in done.stdout


def test_a_skeleton_runs(skeleton):
    flags = ["--hardware-platform", "cpu", "--extra_ops", "quick_norms_ops", "--extra-att", "quick_norms_att"]
    done = polyrec_process("devices", "--json", *flags, "--verify-plugins", "full", path=skeleton)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["error"] is None
    row = next(row for row in report["chosen"]["ops"] if row["field"] == "norm.rms_norm")
    assert (row["origin"], row["implementation"]) == ("plugin", "quick_norms.ops:rms_norm")
    assert "quick-norms 0.0.1" in row["source"]
    attention = report["chosen"]["attention"]
    assert attention["picked"] == "quick_norms_attention"
    brought = {plugin["source"]: (plugin["ops"], plugin["attention"]) for plugin in report["chosen"]["plugins"]}
    assert brought == {
        "quick_norms_ops (quick-norms 0.0.1)": (["norm.rms_norm"], []),
        "quick_norms_att (quick-norms 0.0.1)": ([], ["quick_norms_attention"]),
    }
    shown = polyrec_process("devices", *flags, path=skeleton).stdout
    assert "Plugin quick_norms_ops (quick-norms 0.0.1): norm.rms_norm" in shown


def test_the_list_says_what_would_be_registered(skeleton):
    done = polyrec_process("plugins", "--json", path=skeleton)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"api_version", "plugins", "faults"}
    assert report["api_version"] == API_VERSION
    plugins = {plugin["name"]: plugin for plugin in report["plugins"] if plugin["distribution"] == "quick-norms"}
    ops, att = plugins["quick_norms_ops"], plugins["quick_norms_att"]
    assert set(ops) == set(att) == PLUGIN_KEYS
    assert (ops["group"], att["group"]) == ("polyrec.ops_plugin", "polyrec.att_plugin")
    assert ops["faults"] == att["faults"] == []
    [registered] = ops["registers"]
    assert set(registered) == REGISTRATION_KEYS
    assert (registered["key"], registered["implementation"]) == ("norm.rms_norm", "rms_norm")
    assert [found["key"] for found in att["registers"]] == ["quick_norms_attention"]
    shown = polyrec_process("plugins", path=skeleton).stdout
    for words in ("polyrec.ops_plugin (--extra-ops)", "norm.rms_norm: rms_norm", "quick-norms 0.0.1", API_VERSION):
        assert words in " ".join(shown.split())


def test_the_page_names_every_key():
    text = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in text for key in (*REGISTRATION_KEYS, *PLUGIN_KEYS, "api_version", "plugins"))


def test_listing_imports_no_plugin_and_no_torch(skeleton):
    code = """
import json, sys
from polyrec.cli.main import main
sys.argv = ["polyrec", "plugins"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps([name for name in sys.modules if name.partition(".")[0] in ("torch", "quick_norms")]))
"""
    environment = {**os.environ, "PYTHONPATH": str(skeleton)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert "quick_norms_ops" in done.stdout


def test_faults_are_shown(skeleton, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(skeleton, copy)
    (copy / "quick_norms" / "ops.py").unlink()
    done = polyrec_process("plugins", path=copy)
    assert done.returncode == 0, done.stderr
    assert "plugin_import_failed" in done.stdout
    assert "quick_norms.ops" in done.stdout


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *(
            (name, "plugin_name_invalid")
            for name in ("", "My-Plugin", "a b", "-a", "a--b", "1st", "a.b", "a/b", "class", "ä")
        ),
        *(
            (name, "plugin_name_taken")
            for name in ("json", "polyrec", "torch", "numpy", "scikit-learn", "scikit_learn")
        ),
    ],
)
def test_names_that_cannot_be_used(polyrec, tmp_path, name, code):
    with pytest.raises(ConfigError) as caught:
        polyrec("plugins", "new", "--out", tmp_path / "out", "--", name)
    assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(polyrec, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "file", "link"):
        with pytest.raises(ConfigError) as caught:
            polyrec("plugins", "new", "quick-norms", "--out", tmp_path / name)
        assert caught.value.code == "out_occupied"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "letter.txt", "link", "mine"]


def test_the_commands_it_prints_take_a_folder_with_spaces(polyrec, tmp_path):
    folder = tmp_path / "my plugins" / "one"
    shown = polyrec("plugins", "new", "quick-norms", "--out", folder).output
    [line] = [line for line in shown.splitlines() if "pip install" in line]
    assert shlex.split(line) == ["pip", "install", "-e", str(folder), "&&", "pytest", str(folder)]


def test_a_write_that_fails_leaves_nothing(polyrec, tmp_path, monkeypatch):
    monkeypatch.setattr(Skeleton, "words", lambda self: {})
    with pytest.raises(KeyError):
        polyrec("plugins", "new", "quick-norms", "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_json_belongs_to_the_list(polyrec, tmp_path):
    with pytest.raises(ConfigError) as caught:
        polyrec("plugins", "--json", "new", "quick-norms", "--out", tmp_path / "out")
    assert caught.value.code == "flag_unused"
    assert list(tmp_path.iterdir()) == []
