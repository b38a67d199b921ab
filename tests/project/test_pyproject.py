"""What is imported is declared, what is declared is imported, and the reference libraries stay out of the product."""

from __future__ import annotations

import re
import sys
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement

from .tree import ROOT, imported_roots, parsed, pyproject, source_files

# Imported only when a feature of that extra is used: name -> the extra, and the distribution that it lists.
OPTIONAL = {
    "sentence_transformers": ("text", "sentence-transformers"),
    "flashinfer": ("cuda", "flashinfer-python"),
    "pytest": ("test", "pytest"),
}
# Part of the public interface of a declared distribution, which pins the version that fits.
COMES_WITH = {"starlette": "fastapi", "pydantic_core": "pydantic", "triton": "torch"}
# Needed by another dependency at run time and never imported by name.
INDIRECT = {"tensorboard": "torch.utils.tensorboard needs it"}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extra: str | None = None) -> dict[str, str]:
    """Distribution -> requirement, of the product or of one extra."""
    project = pyproject()["project"]
    requirements = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return {normalised(re.split(r"[<>=!~\[; ]", requirement)[0]): requirement for requirement in requirements}


def imported(folder) -> set[str]:
    """Third-party packages that the Python files of a folder import, anywhere in a file."""
    roots = {root for path in source_files(folder) for _, root in imported_roots(parsed(path))}
    return roots - set(sys.stdlib_module_names) - {"polyrec", "tests"}


def distributions(roots: set[str]) -> dict[str, set[str]]:
    """Import name -> the distributions that may provide it."""
    installed = packages_distributions()
    return {root: {normalised(name) for name in installed.get(root, [root])} for root in roots}


def test_every_import_of_the_product_is_declared():
    required = set(declared())
    providers = distributions(imported(ROOT / "src") - set(OPTIONAL) - set(COMES_WITH))
    assert {root for root, names in providers.items() if not names & required} == set()
    assert set(COMES_WITH.values()) <= required
    for extra, distribution in OPTIONAL.values():
        assert distribution in declared(extra)


def test_every_dependency_of_the_product_is_imported():
    provided = set().union(*distributions(imported(ROOT / "src")).values())
    assert set(declared()) - provided - set(INDIRECT) == set()


def test_every_import_of_the_tests_is_declared():
    allowed = set(declared()) | set(declared("test"))
    beside = {path.stem for path in source_files(ROOT / "tests")}  # helper modules of the tests
    # tomli comes with pytest on Python 3.10, where alone it is imported.
    providers = distributions(imported(ROOT / "tests") - beside - {"tomli"} - set(COMES_WITH))
    assert {root for root, names in providers.items() if not names & allowed} == set()


@pytest.mark.parametrize("name", ["transformers", "triton"])
def test_reference_libraries_are_for_tests_only(name):
    assert name not in declared()
    assert "transformers" in declared("test")


def test_every_requirement_has_a_floor_and_no_ceiling():
    for extra in (None, "test"):
        for requirement in declared(extra).values():
            versions = requirement.partition(";")[0]
            assert re.search(r">=\d", versions), requirement
            assert not re.search(r"[<~]|==", versions), requirement


@pytest.mark.parametrize("implementation", ["CPython", "PyPy"])
@pytest.mark.parametrize("platform", ["linux", "darwin", "win32", "cygwin"])
def test_uvloop_is_required_where_uvicorn_takes_it(platform, implementation):
    ours = Requirement(declared()["uvloop"])
    theirs = next(Requirement(text) for text in requires("uvicorn") or () if text.startswith("uvloop"))
    where = {"sys_platform": platform, "platform_python_implementation": implementation, "extra": "standard"}
    assert ours.marker.evaluate(where) == theirs.marker.evaluate(where)


def test_the_version_is_one():
    import polyrec

    assert pyproject()["project"]["version"] == polyrec.__version__
