"""The pool gives a batch its rows, grows when a batch needs more, and never shrinks."""

from __future__ import annotations

import pytest
import torch

from polyrec.kvcache.pool import KVPool


def make(slots, dtype=torch.float32):
    return KVPool(3, slots, 2, 4, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grows_to_the_largest_batch_and_stays(dtype):
    pool = make(0, dtype)
    sizes = []
    for tokens in (0, 5, 3, 5, 17, 1):
        pool.reserve(tokens)
        sizes.append(pool.num_slots)
        assert pool.keys.shape == pool.values.shape == (3, pool.num_slots, 2, 4)
        assert pool.keys.dtype == pool.values.dtype == dtype
    assert sizes == [0, 5, 5, 5, 17, 17]


def test_a_batch_that_fits_moves_nothing():
    pool = make(8)
    place = pool.keys.data_ptr(), pool.values.data_ptr()
    pool.reserve(8)
    assert (pool.keys.data_ptr(), pool.values.data_ptr()) == place


def test_layers_and_halves_are_apart():
    pool = make(2)
    pool.reserve(6)
    for layer in range(3):
        keys, values = pool.layer(layer)
        assert keys.shape == values.shape == (6, 2, 4)
        keys.fill_(layer)  # a view: what is written here is what the pool holds
        values.fill_(10 + layer)
    assert pool.keys[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert pool.values[:, -1, -1, -1].tolist() == [10, 11, 12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_bytes_per_token(dtype):
    pool = make(100, dtype)
    assert (pool.keys.nbytes + pool.values.nbytes) / 100 == pool.bytes_per_token == 2 * 2 * 4 * 3 * dtype.itemsize
    assert make(0, dtype).bytes_per_token == pool.bytes_per_token
