"""How many embedding rows a vocabulary gets. Imports no torch."""

from __future__ import annotations

ROW_MULTIPLE = 256  # matrix kernels and tensor-parallel shards want the rows of embedding and head to divide evenly


def padded_vocab_size(num_tokens: int) -> int:
    """The smallest multiple of 256 that holds `num_tokens` rows."""
    return -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
