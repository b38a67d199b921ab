"""What an import loads: `import polyrec` and `--help` stay light, torch-free modules stay torch-free."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from .tree import SOURCE, module_names, parsed, pyproject

HEAVY = {
    "torch",
    "numpy",
    "scipy",
    "sklearn",
    "polars",
    "faiss",
    "matplotlib",
    "transformers",
    "fastapi",
    "tensorboard",
}


def run(code: str) -> object:
    """The JSON printed by a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def loaded_by(code: str) -> set[str]:
    """Top-level packages loaded after `code` in a fresh interpreter."""
    report = "\nimport json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    return set(run(code + report))


def torch_free_modules() -> list[str]:
    """The modules that the import contract names, packages with all their modules."""
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    named = next(contract["source_modules"] for contract in contracts if contract["id"] == "torch-free")
    return [name for name in module_names() if any(name == root or name.startswith(f"{root}.") for root in named)]


def test_importing_polyrec_is_light():
    assert not loaded_by("import polyrec") & HEAVY


def test_torch_free_modules_load_no_torch():
    modules = torch_free_modules()
    assert "polyrec.sid.layout" in modules
    assert "polyrec.core.errors" in modules
    code = f"""
import importlib, json, sys
guilty = []
for name in {modules!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        guilty.append(name)
        break
print(json.dumps(guilty))"""
    assert run(code) == []


@pytest.mark.parametrize("package", ["data", "sid", "evaluation", "server", "cli"])
def test_packages_with_torch_free_modules_have_light_inits(package):
    assert not loaded_by(f"import polyrec.{package}") & HEAVY


def test_help_loads_no_torch():
    code = """
import sys
from polyrec.cli.main import main
sys.argv = ["polyrec", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert not loaded_by(code) & {"torch", "transformers", "sklearn", "faiss", "matplotlib"}


@pytest.mark.parametrize(
    "arguments", [["plugins"], ["plugins", "--json"], ["plugins", "new", "--help"], ["devices", "-h"]]
)
def test_what_needs_no_device_loads_no_torch(arguments):
    code = f"""
import sys
from polyrec.cli.main import main
sys.argv = ["polyrec", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert not loaded_by(code) & {"torch", "transformers", "sklearn", "faiss", "matplotlib", "polars"}


@pytest.mark.parametrize("name", ["base.config", "base.probe", "base.registry", "plugin.common", "plugin.survey"])
def test_the_torch_free_part_of_the_hardware_layer(name):
    assert "torch" not in loaded_by(f"import polyrec.hardware.{name}")


def test_the_plugin_api_is_light():
    assert (
        not loaded_by("from polyrec.plugin_api import API_VERSION, Plugin, register_att_backend, register_ops") & HEAVY
    )


OPTIONAL = {"transformers", "triton", "flashinfer", "sentence_transformers", "torch_npu", "torch_musa"}


def is_a_kernel_file(name: str) -> bool:
    """Of Triton, whose decorators run at import, or of FlashInfer, or beside such a file and importing it: whoever launches a
    kernel imports its file when built."""
    path = SOURCE.parent.joinpath(*name.split(".")).with_suffix(".py")
    body = parsed(path).body if path.is_file() else []
    imported = {node.names[0].name for node in body if isinstance(node, ast.Import)}
    beside = [node for node in body if isinstance(node, ast.ImportFrom) and node.level == 1]
    package = name.rpartition(".")[0]
    names = {node.module or alias.name for node in beside for alias in node.names}
    return bool({"triton", "flashinfer"} & imported) or any(is_a_kernel_file(f"{package}.{one}") for one in names)


def test_every_module_imports_and_none_needs_an_optional_package():
    modules = [name for name in module_names() if not name.endswith("__main__") and not is_a_kernel_file(name)]
    assert "polyrec.attention.sdpa" in modules
    code = f"""
import importlib, sys
for name in {sorted(OPTIONAL)!r}:
    sys.modules[name] = None  # importing it now raises
for name in {modules!r}:
    importlib.import_module(name)
for name in {sorted(OPTIONAL)!r}:
    del sys.modules[name]"""
    assert "polyrec" in loaded_by(code)


def test_the_source_tree_has_an_init_in_every_package():
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
