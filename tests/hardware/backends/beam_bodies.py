"""The tests of the reference beam step, ready to run on another implementation: one test body for all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).parents[1] / "test_search_ops.py"


def beam_tests(beam_step: Callable[..., Any]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every test of the file that calls the beam step, with each of its seeds, on `beam_step` instead of the reference."""
    spec = importlib.util.spec_from_file_location("beam_step_tests", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.REFERENCE_OPS = SimpleNamespace(search=SimpleNamespace(beam_step=beam_step))
    for name, function in vars(module).items():
        if not name.startswith("test_") or not {"beam_step", "root_step"} & set(function.__code__.co_names):
            continue
        marks = getattr(function, "pytestmark", [])
        seeds = [seed for mark in marks if mark.args[0] == "seed" for seed in mark.args[1]]
        for seed in seeds:
            yield f"{name}[{seed}]", lambda function=function, seed=seed: function(seed)
        if not marks:
            yield name, function
