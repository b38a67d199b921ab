"""What is said of a capture that failed."""

from __future__ import annotations

import torch

from polyrec.hardware.base.graph import capture_failed


def scaled_product(x):
    return torch.mm(x, torch.ones(3, 2))


def search():
    return scaled_product(torch.ones(4, 5))


def failure_of(function):
    try:
        function()
    except RuntimeError as error:
        return capture_failed(function, error)
    raise AssertionError("it does not fail")


def test_a_capture_that_failed_names_the_operation():
    """The innermost function that is not a library's."""
    search.__qualname__ = "search of 2 requests, 8 beams"
    found = failure_of(search)
    assert found.code == "graph_capture_failed"
    line = scaled_product.__code__.co_firstlineno + 1
    place = f"in scaled_product (test_graph.py, line {line})"
    assert f"'search of 2 requests, 8 beams' could not be captured, {place}: RuntimeError: " in str(found)
    assert ".item()" in found.remedy


def test_an_error_without_a_place_is_told_all_the_same():
    error = RuntimeError("the capture was invalidated\nand more")
    found = capture_failed(search, error)
    assert "could not be captured: RuntimeError: the capture was invalidated" in str(found)
    assert "and more" not in str(found)


def test_a_capture_without_room_says_what_leaves_more():
    found = capture_failed(search, torch.OutOfMemoryError("tried to allocate 2.00 GiB"))
    assert found.code == "graph_memory_exceeded"
    assert "2.00 GiB" in str(found)
    assert "--memory-fraction" in found.remedy
