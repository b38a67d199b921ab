"""Kernels that begin before the one before them has ended: they wait before they touch memory, in source and as compiled."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import polyrec

pytest.importorskip("triton")  # made for Linux

SOURCE = Path(polyrec.__file__).parent
FILES = [*SOURCE.glob("hardware/backends/cuda_like/kernels/*.py"), *SOURCE.glob("attention/triton*.py")]


def kernels_that_come_early() -> dict[str, ast.FunctionDef]:
    functions = [
        node
        for path in FILES
        if path.name != "early.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    return {node.name: node for node in functions if any(argument.arg == "EARLY" for argument in node.args.args)}


def test_a_kernel_waits_first_and_lets_the_next_begin_somewhere():
    kernels = kernels_that_come_early()
    assert len(kernels) > 15
    for name, node in kernels.items():
        statements = [ast.unparse(part) for part in node.body]
        if ast.get_docstring(node) is not None:
            statements.pop(0)
        assert statements[0] == "wait_for_earlier(EARLY)", name
        assert "let_next_begin(EARLY)" in "\n".join(statements), name


def compiled(kernel, constants, types):
    """The PTX of a kernel for Hopper. types: of arguments that are no bf16 tensors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def norm():
    from polyrec.hardware.backends.cuda_like.kernels.norm import _rms_norm

    constants = {"SIZE": 2048, "COLUMNS": 2048, "ROWS": 1, "ADD": True, "FP8": True, "SPLITS": 0}
    numbers = dict.fromkeys(("rows", "inner", "x_outer", "x_inner", "residual_outer", "residual_inner"), "i32")
    types = {**numbers, "eps": "fp32", "out": "*fp8e4nv", "scale": "*fp32"}
    return _rms_norm, constants | dict.fromkeys(("x_scale", "channel_scale", "bias")), types


def product():
    from polyrec.hardware.backends.cuda_like.kernels.few_rows_mm import few_rows_scaled_mm_kernel

    constants = {"ROWS": 64, "COLUMNS": 32, "DEPTH": 128, "SPLIT": False, "RAGGED": False, "EXACT": False, "bias": None}
    types = dict.fromkeys(("rows", "outputs", "inputs", "q_stride", "blocks"), "i32")
    types |= {"q": "*fp8e4nv", "weight": "*fp8e4nv", "q_scale": "*fp32", "weight_scale": "*fp32"}
    return few_rows_scaled_mm_kernel, constants, types


def packed():
    from polyrec.attention.triton_kernels import packed_kernel

    constants = {"HEADS": 4, "GROUP": 2, "DIM": 64, "ROWS": 64, "KEYS": 64, "CAPPED": False, "WINDOWED": False}
    numbers = ("window", "q_row", "q_head", "k_row", "k_head", "v_row", "v_head")
    types = {**dict.fromkeys(numbers, "i32"), "items": "*i32", "count": "*i32", "scale": "fp32", "soft_cap": "fp32"}
    return packed_kernel, constants, types


@pytest.mark.parametrize("of", [norm, product, packed])
@pytest.mark.parametrize("early", [False, True])
def test_no_compiler_moves_an_access_before_the_wait(of, early):
    kernel, constants, types = of()
    code = compiled(kernel, {**constants, "EARLY": early}, types)
    wait, begin = code.find("griddepcontrol.wait"), code.find("griddepcontrol.launch_dependents")
    assert (wait >= 0) is (begin >= 0) is early
    accesses = [match.start() for match in re.finditer(r"\b[a-z][\w.:]*\.global", code)]  # of whatever kind
    stores = [match.start() for match in re.finditer(r"st\.global", code)]
    assert accesses
    assert stores
    if early:
        assert wait < min(accesses)
        assert begin < min(stores)


@pytest.mark.parametrize(
    ("backend", "architecture", "has_it"),
    [("cuda", 90, True), ("cuda", 100, True), ("cuda", 89, False), ("hip", "gfx942", False)],
)
def test_kernels_come_early_where_the_device_can(monkeypatch, backend, architecture, has_it):
    from polyrec.hardware.backends.cuda_like.kernels import early

    target = SimpleNamespace(backend=backend, arch=architecture)
    monkeypatch.setattr(early, "driver", SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target)))
    early._device_has_it.cache_clear()
    try:
        assert early.early() == ({"EARLY": True, "launch_pdl": True} if has_it else {"EARLY": False})
    finally:
        early._device_has_it.cache_clear()
