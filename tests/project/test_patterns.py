"""What the architecture forbids, found in the syntax trees of the source; each check is tried on bad examples too."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from polyrec.hardware import platform_names

from .tree import ROOT, imported_roots, parsed, relative, source_files

# What belongs to one device only. Above hardware/ these neither appear as `torch.<name>` nor in comparisons.
DEVICE_MODULES = {"cuda", "npu", "musa", "xpu", "mps", "hip", "maca", "privateuseone"}
DEVICE_NAMES = DEVICE_MODULES | {"privateuse1", "gpu"} | set(platform_names())

# Vendor library -> where alone it may be imported (a prefix of the path inside the package).
VENDOR_PLACES: dict[str, tuple[str, ...]] = {
    "flashinfer": ("attention/flashinfer",),
    "triton": ("attention/triton", "hardware/backends/"),
    "torch_npu": ("hardware/backends/ascend/",),
    "torch_musa": ("hardware/backends/musa/",),
    "intel_extension_for_pytorch": ("hardware/backends/xpu/",),
    "pynvml": ("hardware/backends/",),
    "cupy": ("hardware/backends/",),
    "transformers": (),
}

# Where anything may be caught and not raised again: file, function -> the reason.
BROAD_EXCEPTS = {
    ("hardware/choose.py", "probe_platform"): "a vendor's probe may fail in any way; the failure is what is reported",
    ("server/lines.py", "_read"): "a message that fails does not end the engine's thread; the event loop raises it",
}

# A file longer than 400 lines holds a second idea, unless it is listed here with the reason.
LONG_FILES: dict[str, str] = {}
MAX_LINES = 400

Finding = tuple[int, str]


def device_calls(tree: ast.Module) -> Iterator[Finding]:
    """`torch.cuda`, `torch.npu`, …, also as `from torch import cuda` and `import torch.cuda`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in DEVICE_MODULES:
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                yield node.lineno, f"torch.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            names = {*node.module.split(".")[1:], *(alias.name for alias in node.names)}
            yield from ((node.lineno, f"torch.{name}") for name in sorted(names & DEVICE_MODULES))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "torch" and DEVICE_MODULES & set(parts):
                    yield node.lineno, alias.name


def device_comparisons(tree: ast.Module) -> Iterator[Finding]:
    """`x == "cuda"`, `x in ("cuda",)`, `x.startswith("npu")`, `case "cuda":`, `{"cuda": f}[x]`, `getattr(torch, "cuda")`."""
    for node in ast.walk(tree):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            operands = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in {"getattr", "hasattr"}:
                operands = node.args[1:2]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in {"startswith", "endswith", "removeprefix"}:
                operands = node.args
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        for operand in operands:
            for part in ast.walk(operand):
                text = part.value if isinstance(part, ast.Constant) else None
                if isinstance(text, str) and text.rstrip(":").lower() in DEVICE_NAMES:
                    yield operand.lineno, f"compares with {text!r}"


def broad_excepts(tree: ast.Module) -> Iterator[Finding]:
    """`except:` and `except (Base)Exception`, unless the handler ends in `raise`, or in `raise X from` what it caught."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {kind.id if isinstance(kind, ast.Name) else "" for kind in kinds if kind is not None}
        last = node.body[-1]
        raises_again = isinstance(last, ast.Raise) and (last.exc is None or _keeps_cause(last, node.name))
        if (node.type is None or names & {"Exception", "BaseException"}) and not raises_again:
            yield node.lineno, "except " + (", ".join(sorted(names)) or "everything")


def _keeps_cause(raised: ast.Raise, caught: str | None) -> bool:
    return isinstance(raised.cause, ast.Name) and raised.cause.id == caught


def function_at(tree: ast.Module, line: int) -> str:
    """The innermost function that holds a line."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    around = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.lineno <= line <= node.end_lineno]
    return max(around, key=lambda node: node.lineno).name if around else ""


def findings(check: Callable[[ast.Module], Iterator[Finding]], *, outside: str = "") -> list[str]:
    """`path:line what` for every file, those under `outside` left out."""
    return [
        f"{relative(path)}:{line} {what}"
        for path in source_files()
        if not (outside and relative(path).startswith(outside))
        for line, what in check(parsed(path))
    ]


def test_device_modules_of_torch_stay_under_hardware():
    assert findings(device_calls, outside="hardware/") == []


def test_no_device_name_is_compared_above_hardware():
    assert findings(device_comparisons, outside="hardware/") == []


def test_broad_excepts_raise_again_or_are_listed_with_a_reason():
    found = [
        (relative(path), function_at(parsed(path), line))
        for path in source_files()
        for line, _ in broad_excepts(parsed(path))
    ]
    assert sorted(found) == sorted(BROAD_EXCEPTS)


def test_every_registered_platform_is_a_name_that_must_not_be_compared():
    assert {"cpu", "nvidia", "ascend"} <= DEVICE_NAMES


def test_vendor_libraries_stay_in_their_places():
    strays = [
        f"{relative(path)}:{line} imports {root}"
        for path in source_files()
        for line, root in imported_roots(parsed(path))
        if root in VENDOR_PLACES and not relative(path).startswith(VENDOR_PLACES[root] or ("nowhere",))
    ]
    assert strays == []


def test_long_files_are_listed_with_a_reason():
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in source_files()}
    assert {name for name, length in lengths.items() if length > MAX_LINES} == set(LONG_FILES)


def test_every_file_says_what_it_owns():
    assert [relative(path) for path in source_files() if not ast.get_docstring(parsed(path))] == []


def test_no_path_of_one_machine():
    # A home or scratch folder; the preceding character tells a path from a URL or a word.
    pattern = re.compile(r"(?<![\w./:{}-])/(?:work|root|home|Users|mnt|data\d*)/\w")
    folders = [ROOT / name for name in ("src", "tests", "docs", "benchmarks", "examples", ".ci", "backends")]
    files = [path for folder in folders if folder.is_dir() for path in folder.rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml"}]
    text_kinds = {".py", ".md", ".toml", ".json", ".yaml", ".yml", ".html", ".js", ".css", ".sh", ".txt", ""}
    strays = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()[:100]}"
        for path in files
        if path.suffix in text_kinds and "__pycache__" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert strays == []


@pytest.mark.parametrize(
    ("check", "bad", "good"),
    [
        (device_calls, "x = torch.cuda.is_available()", "x = runtime.cuda.is_available()"),
        (device_calls, "from torch import cuda", "from torch import nn"),
        (device_calls, "import torch.cuda.nvtx", "import torch.nn"),
        (device_calls, "from torch.cuda import Stream", "'''torch.cuda.Stream'''"),
        (device_comparisons, "if device.type == 'cuda': pass", "if rule == 'level': pass"),
        (device_comparisons, "x = name in ('cpu', 'npu')", "x = name in ('cpus',)"),
        (device_comparisons, "device.startswith('cuda:')", "device.startswith('item')"),
        (device_comparisons, "match d:\n case 'xpu': pass", "match d:\n case 'sid': pass"),
        (device_comparisons, "f = {'rocm': a}[name]", "f = {'rules': a}[name]"),
        (device_comparisons, "f = getattr(torch, 'npu')", "f = getattr(torch, name)"),
        (broad_excepts, "try: pass\nexcept: pass", "try: pass\nexcept OSError: pass"),
        (
            broad_excepts,
            "try: pass\nexcept Exception as e: print(e)",
            "try: pass\nexcept BaseException:\n  f()\n  raise",
        ),
        (
            broad_excepts,
            "try: pass\nexcept (OSError, Exception): pass",
            "try: pass\nexcept (OSError, ValueError): pass",
        ),
        (
            broad_excepts,
            "try: pass\nexcept Exception as e:\n  raise ValueError from None",
            "try: pass\nexcept Exception as e:\n  raise ValueError from e",
        ),
        (
            broad_excepts,
            "try: pass\nexcept Exception as e:\n  raise ValueError from other",
            "try: pass\nexcept Exception as other:\n  f()\n  raise ValueError from other",
        ),
    ],
)
def test_the_checks_see_bad_examples_and_pass_good_ones(check, bad, good):
    assert len(list(check(ast.parse(bad)))) >= 1
    assert list(check(ast.parse(good))) == []
