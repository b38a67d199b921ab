"""The e4m3 numbers from their bits, in plain Python, and rounding to them by search: what quantised tensors are tested with."""

from __future__ import annotations

import numpy as np
import torch


def e4m3_values():
    """float64 [256]: sign, four exponent bits (bias 7), three mantissa bits; both codes of all ones are NaN."""
    values = []
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        size = np.nan if (exponent, mantissa) == (15, 7) else size
        values.append(-size if code & 128 else size)
    return np.array(values)


VALUES = e4m3_values()
_EVEN_FIRST = np.array(sorted((c for c in range(256) if VALUES[c] == VALUES[c]), key=lambda c: (c & 1, c)))


def decode(tensor):
    """A float8_e4m3fn tensor's numbers as float64, by table."""
    return VALUES[tensor.contiguous().view(torch.uint8).numpy()]


def nearest(numbers):
    """The e4m3 number nearest to each; of two equally near, the one with an even mantissa."""
    flat = np.asarray(numbers, dtype=np.float64).reshape(-1)
    place = np.abs(flat[:, None] - VALUES[_EVEN_FIRST]).argmin(1)
    return VALUES[_EVEN_FIRST][place].reshape(np.shape(numbers))
