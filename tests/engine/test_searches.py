"""Searches and their results go to another process and come back as they were."""

import pickle

import numpy as np
import pytest

from polyrec.engine.searches import SearchRequest, SearchResult


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_a_request_arrives_as_it_was_sent(dtype):
    request = SearchRequest(np.arange(7, dtype=dtype)[::2], 3, 5, None, np.array([4, 9]))
    got = pickle.loads(pickle.dumps(request))
    assert (got.prompt.tolist(), got.n, got.beam_width) == ([0, 2, 4, 6], 3, 5)
    assert got.prompt.dtype == np.int64
    assert got.prompt.flags.writeable, "torch shares the memory of such arrays alone without a warning"
    assert got.excluded is None
    assert got.allowed.tolist() == [4, 9]


@pytest.mark.parametrize("num", [0, 3])
def test_a_result_arrives_as_it_was_sent(num):
    got = pickle.loads(pickle.dumps(SearchResult(np.arange(num) + 5, np.linspace(-1, 0, num, dtype=np.float32))))
    assert got.leaves.tolist() == list(range(5, 5 + num))
    assert got.scores.tolist() == np.linspace(-1, 0, num, dtype=np.float32).tolist()
    assert (got.leaves.dtype, got.scores.dtype) == (np.int64, np.float32)
