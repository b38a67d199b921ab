"""The pool: rows of zeros for each layer."""

from __future__ import annotations

import pytest
import torch

from polyrec.kvcache.pool import KVPool

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def make(slots, dtype=torch.float32):
    return KVPool(3, slots, 2, 4, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [0, 7])
def test_begins_with_zeros(dtype, slots):
    pool = make(slots, dtype)
    assert pool.num_slots == slots
    for part in (pool.keys, pool.values):
        assert part.dtype == dtype
        assert part.shape == (3, slots, 2, 4)
        assert not part.float().any()


def test_layers_and_halves_are_apart():
    pool = make(6)
    for layer in range(3):
        keys, values = pool.layer(layer)
        assert keys.shape == values.shape == (6, 2, 4)
        keys.fill_(layer)  # a view: what is written here is what the pool holds
        values.fill_(10 + layer)
    assert pool.keys[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert pool.values[:, -1, -1, -1].tolist() == [10, 11, 12]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_per_token(dtype):
    pool = make(100, dtype)
    assert (pool.keys.nbytes + pool.values.nbytes) / 100 == pool.bytes_per_token == 2 * 2 * 4 * 3 * dtype.itemsize
    assert make(0, dtype).bytes_per_token == pool.bytes_per_token
